"""The settings of the user: options, marks, and the resolved case of one call.

Import from its modules: every pytest run loads the options, but few runs need the rest.
"""
