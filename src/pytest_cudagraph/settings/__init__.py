"""What the user asked for: options, marks, and the case of one call.

The only room that reads pytest's configuration and marks. Names are loaded when they are first used: every pytest run
of an environment loads the options, few need marks and cases.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_cudagraph.settings.case import CallSettings, Case, make_case
    from pytest_cudagraph.settings.marks import (
        FIXTURES,
        MARK,
        MARK_HELP,
        MarkSettings,
        concerns_plugin,
        read_marks,
        uses_plugin,
    )
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
    "concerns_plugin",
    "make_case",
    "read_marks",
    "read_settings",
    "uses_plugin",
]

_HOMES = {
    "case": ("CallSettings", "Case", "make_case"),
    "marks": ("FIXTURES", "MARK", "MARK_HELP", "MarkSettings", "concerns_plugin", "read_marks", "uses_plugin"),
    "options": ("OPTIONS", "Option", "Settings", "add_options", "read_settings"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
