"""Serves models without pytest: ``GraphRunner``, the drop-in compiler for pipelines, and the monitor of calls.

The names are for code that was written for another compiler and another monitor: one import changes. Each is loaded at
its first use. ``performance_monitor`` is a shared monitor, and ``monitor_inference``, ``monitor_compilation`` and
``monitor_evaluation`` are its decorators.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = dict.fromkeys(("IntegratedAOTCompiler", "create_integrated_compiler"), "drop_in") | dict.fromkeys(
    ("PerformanceMonitor", "SimplePerformanceMonitor", "monitor_compilation", "monitor_evaluation",
     "monitor_inference", "performance_monitor"),
    "calls.earlier_names",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
