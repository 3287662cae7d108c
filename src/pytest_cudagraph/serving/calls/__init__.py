"""The calls of serving code: how long they took, what they made, and what served them.

``performance_monitor`` is a shared monitor with the names of an earlier monitor, and
``monitor_inference``, ``monitor_compilation`` and ``monitor_evaluation`` are its decorators. They are made at their
first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from pytest_cudagraph.serving.calls.call_monitor import CallMonitor
from pytest_cudagraph.serving.calls.call_summary import CallSummary
from pytest_cudagraph.serving.calls.resource_sampler import ResourceSampler, ResourceSpread
from pytest_cudagraph.serving.calls.timed_call import CallRecord, TimedCall, note_served


def __getattr__(name: str) -> Any:
    # An import statement would ask this function for the module.
    earlier_names = import_module(f"{__name__}.earlier_names")
    if name not in earlier_names.NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(earlier_names, name)
