"""Decoding with captured steps: the fixtures ``decode_engine`` and ``engine_modes``.

Nothing is imported here: the core of the plugin knows nothing of it.
"""
