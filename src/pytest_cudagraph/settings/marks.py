"""The ``graph_speedup`` mark, parsed at collection. Errors name the node, the value and what is allowed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cudagraph.foreign import value_text
from pytest_cudagraph.settings.options import COMPILE_MODES, DEVICES, DeviceOption
from pytest_cudagraph.settings.parsing import (
    check_covered,
    distinct_sizes,
    fraction,
    min_speedups,
    number,
    one_of,
    seconds,
    whole_number,
)

if TYPE_CHECKING:
    from pytest_cudagraph.values import CompileMode

MARK = "graph_speedup"
FIXTURES = frozenset(
    {"cudagraph", "compile_model", "capture_graphs", "assert_replay_close", "measure_speedup", "perf_monitor"}
)

MARK_HELP = (
    f"{MARK}(min=1.15 | {{batch: min}}, *, max_slowdown, max_new_kernels, batch_sizes, compile, device, rtol, atol, "
    "time_budget): gate the CUDA graph of the model that the test hands to the cudagraph fixtures"
)


def uses_plugin(item: pytest.Item) -> bool:
    """Whether a test uses a fixture of the plugin."""
    return not FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))


def concerns_plugin(item: pytest.Item) -> bool:
    """Whether a test uses a fixture of the plugin or has its mark."""
    return uses_plugin(item) or item.get_closest_marker(MARK) is not None


MARK_PARSERS: dict[str, Callable[[Any], Any]] = {
    "min": min_speedups,
    "max_slowdown": fraction(may_be_off=True),
    "max_new_kernels": whole_number,
    "batch_sizes": distinct_sizes,
    "compile": one_of(*COMPILE_MODES),
    "device": one_of(*DEVICES),
    "rtol": number(at_least=0),
    "atol": number(at_least=0),
    "time_budget": seconds,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkSettings:
    """The values of one test's markers; the closest marker wins per key. None where no marker sets a key."""

    min: float | Mapping[int, float] | None = None
    max_slowdown: float | None = None
    max_new_kernels: int | None = None
    batch_sizes: tuple[int, ...] | None = None
    compile: CompileMode | None = None
    device: DeviceOption | None = None
    rtol: float | None = None
    atol: float | None = None
    time_budget: float | None = None


def read_marks(item: pytest.Item) -> MarkSettings:
    """Read the ``graph_speedup`` marks of one test; raises :class:`pytest.UsageError` for any mistake."""
    merged: dict[str, Any] = {}
    for mark in item.iter_markers(MARK):
        for key, value in _read_mark(item.nodeid, mark).items():
            merged.setdefault(key, value)
    if merged.keys() >= {"min", "batch_sizes"} and isinstance(merged["min"], Mapping):
        try:
            check_covered(merged["min"], merged["batch_sizes"])
        except ValueError as mistake:
            raise pytest.UsageError(f"{item.nodeid}: @pytest.mark.{MARK}: {mistake}") from None
    if any(item.iter_markers(MARK)) and not uses_plugin(item):
        raise pytest.UsageError(
            f"{item.nodeid}: @pytest.mark.{MARK} needs a test that uses one of these fixtures: "
            f"{', '.join(sorted(FIXTURES))}; found {', '.join(getattr(item, 'fixturenames', ())) or 'none'}"
        )
    return MarkSettings(**merged)


def _read_mark(nodeid: str, mark: pytest.Mark) -> dict[str, Any]:
    name = f"{nodeid}: @pytest.mark.{MARK}"
    if mark.args:
        found = value_text(mark.args[0])
        raise pytest.UsageError(f"{name} takes no positional arguments; found {found}; write min={found}")
    parsed = {}
    for key, value in mark.kwargs.items():
        if key not in MARK_PARSERS:
            raise pytest.UsageError(f"{name} does not take {key}; it takes: {', '.join(MARK_PARSERS)}")
        try:
            parsed[key] = MARK_PARSERS[key](value)
        except ValueError as allowed:
            raise pytest.UsageError(f"{name}: {key} takes {allowed}; found {value_text(value)}") from None
    return parsed
