"""The ``graph_speedup`` mark, parsed at collection: every mistake names the node, the value and what is allowed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cudagraph.settings.options import COMPILE_MODES, DEVICES, DeviceOption
from pytest_cudagraph.settings.parsing import (
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
    """Whether a test asks for one of our fixtures."""
    return not FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))


def concerns_plugin(item: pytest.Item) -> bool:
    """Whether a test uses the plugin, or is marked as if it did."""
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
    """What the markers of one test say, the closest per key; None where they say nothing."""

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
    """The ``graph_speedup`` marks of one test; every mistake is a :class:`pytest.UsageError` naming the node."""
    merged: dict[str, Any] = {}
    for mark in item.iter_markers(MARK):
        for key, value in _read_mark(item.nodeid, mark).items():
            merged.setdefault(key, value)
    if merged.keys() >= {"min", "batch_sizes"} and isinstance(merged["min"], Mapping):
        _refuse_unmeasured(merged["min"], merged["batch_sizes"], f"{item.nodeid}: @pytest.mark.{MARK}")
    if any(item.iter_markers(MARK)) and not uses_plugin(item):
        raise pytest.UsageError(
            f"{item.nodeid}: @pytest.mark.{MARK} needs a test that uses one of our fixtures: "
            f"{', '.join(sorted(FIXTURES))}; found {', '.join(getattr(item, 'fixturenames', ())) or 'none'}"
        )
    return MarkSettings(**merged)


def _read_mark(nodeid: str, mark: pytest.Mark) -> dict[str, Any]:
    name = f"{nodeid}: @pytest.mark.{MARK}"
    if mark.args:
        raise pytest.UsageError(
            f"{name} takes no positional arguments; found {mark.args[0]!r}; write min={mark.args[0]!r}"
        )
    parsed = {}
    for key, value in mark.kwargs.items():
        if key not in MARK_PARSERS:
            raise pytest.UsageError(f"{name} does not take {key}; it takes: {', '.join(MARK_PARSERS)}")
        try:
            parsed[key] = MARK_PARSERS[key](value)
        except ValueError as allowed:
            raise pytest.UsageError(f"{name}: {key} takes {allowed}; found {value!r}") from None
    return parsed


def _refuse_unmeasured(minimums: Mapping[int, float], sizes: Sequence[int], where: str) -> None:
    left_out = sorted(set(minimums) - set(sizes))
    if left_out:
        raise pytest.UsageError(
            f"{where}: min names batch size {left_out[0]}, which batch_sizes {tuple(sizes)} leaves out"
        )
