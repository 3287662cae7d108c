"""What the user asked for: options, marks, and the case of one call.

The only room that reads pytest's configuration and marks.
"""

from pytest_cudagraph.settings.case import CallSettings, Case, make_case
from pytest_cudagraph.settings.marks import FIXTURES, MARK, MARK_HELP, MarkSettings, read_marks, uses_plugin
from pytest_cudagraph.settings.options import OPTIONS, Option, Settings, add_options, read_settings

__all__ = [
    "FIXTURES",
    "MARK",
    "MARK_HELP",
    "OPTIONS",
    "CallSettings",
    "Case",
    "MarkSettings",
    "Option",
    "Settings",
    "add_options",
    "make_case",
    "read_marks",
    "read_settings",
    "uses_plugin",
]
