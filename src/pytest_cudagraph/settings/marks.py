"""The marks ``graph_speedup``, ``decode`` and ``workload``, parsed at collection.

Errors name the node, the value and what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from pytest_cudagraph.foreign import value_text
from pytest_cudagraph.settings.options import DeviceOption
from pytest_cudagraph.settings.other_plugins import device_of
from pytest_cudagraph.settings.parsing import (
    DEVICES,
    check_covered,
    distinct_sizes,
    fraction,
    min_speedups,
    name,
    number,
    one_of,
    reasons,
    seconds,
    whole_number,
)
from pytest_cudagraph.settings.registered import (
    COMPILE_MODES,
    FIXTURES,
    MARK,
    WORKLOAD_FIXTURES,
    WORKLOAD_MARK,
    FeatureMark,
    feature_marks,
)

if TYPE_CHECKING:
    from pytest_cudagraph.values import CompileMode

MARK_PARSERS: dict[str, Callable[[Any], Any]] = {
    "min": min_speedups,
    "max_slowdown": fraction(may_be_off=True),
    "max_new_kernels": whole_number,
    "min_over_compiled": number(above=0),
    "accept": reasons,
    "batch_sizes": distinct_sizes,
    "compile": one_of(*COMPILE_MODES),
    "device": one_of(*DEVICES),
    "rtol": number(at_least=0),
    "atol": number(at_least=0),
    "time_budget": seconds,
}
WORKLOAD_PARSERS: dict[str, Callable[[Any], Any]] = {"group": name, "name": name}


class Workload(NamedTuple):
    """What a test measures in its suite: tests of one group are ranked."""

    group: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkSettings:
    """The values of one test's markers; the closest marker wins per key. None where no marker sets a key."""

    min: float | Mapping[int, float] | None = None
    max_slowdown: float | None = None
    max_new_kernels: int | None = None
    min_over_compiled: float | None = None
    accept: Mapping[str, str] | None = None
    batch_sizes: tuple[int, ...] | None = None
    compile: CompileMode | None = None
    device: DeviceOption | None = None
    rtol: float | None = None
    atol: float | None = None
    time_budget: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the mark of a feature sets beside these."""
    workload: Workload | None = None


def read_marks(item: pytest.Item) -> MarkSettings:
    """Read the marks of one test. Raises :class:`pytest.UsageError` for any mistake."""
    marks = {mark.name: mark for mark in feature_marks(item.config)}
    named = [name for name in (MARK, *marks) if item.get_closest_marker(name) is not None]
    if len(named) > 1:
        raise pytest.UsageError(
            f"{item.nodeid}: a test has @pytest.mark.{named[0]} or @pytest.mark.{named[1]}, not both"
        )
    workload = _workload_of(item)
    if named and named[0] in marks:
        return MarkSettings(workload=workload, **_of_feature(item, marks[named[0]]))
    return MarkSettings(workload=workload, **_merged(item, MARK, MARK_PARSERS, FIXTURES))


def _of_feature(item: pytest.Item, mark: FeatureMark) -> dict[str, Any]:
    # In the order in which an error lists them: the speedup, the feature's arguments, the other settings.
    first, *others = sorted(mark.settings, key=lambda key: key != "min_speedup") or [""]
    shared = {key: MARK_PARSERS["min" if key == "min_speedup" else key] for key in (first, *others) if key}
    leading = {first: shared.pop(first)} if first == "min_speedup" else {}
    merged = _merged(item, mark.name, {**leading, **mark.parsers, **shared}, mark.fixtures)
    options = {key: merged.pop(key) for key in mark.parsers if key in merged}
    least = {"min": merged.pop("min_speedup")} if "min_speedup" in merged else {}
    return {**least, **merged, "options": options}


def _workload_of(item: pytest.Item) -> Workload | None:
    """Parametrised cases of one function are a group, unless the mark says otherwise."""
    marked = _merged(item, WORKLOAD_MARK, WORKLOAD_PARSERS, WORKLOAD_FIXTURES)
    if item.get_closest_marker(WORKLOAD_MARK) is None:
        return None
    parameters = getattr(getattr(item, "callspec", None), "id", "")
    function = item.nodeid.removesuffix(f"[{parameters}]")
    return Workload(marked.get("group", function), marked.get("name", parameters or item.name))


def _merged(
    item: pytest.Item, name: str, parsers: Mapping[str, Callable[[Any], Any]], fixtures: frozenset[str]
) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    parsers = {**parsers, "device": device_of(item.config)} if "device" in parsers else parsers
    for mark in item.iter_markers(name):
        for key, value in _read_mark(item.nodeid, mark, parsers).items():
            merged.setdefault(key, value)
    least = merged.get("min", merged.get("min_speedup"))
    if "batch_sizes" in merged and isinstance(least, Mapping):
        try:
            check_covered(least, merged["batch_sizes"])
        except ValueError as mistake:
            raise pytest.UsageError(f"{item.nodeid}: @pytest.mark.{name}: {mistake}") from None
    if any(item.iter_markers(name)) and fixtures.isdisjoint(getattr(item, "fixturenames", ())):
        raise pytest.UsageError(
            f"{item.nodeid}: @pytest.mark.{name} needs a test that uses one of these fixtures: "
            f"{', '.join(sorted(fixtures))}; found {', '.join(getattr(item, 'fixturenames', ())) or 'none'}"
        )
    return merged


def _read_mark(nodeid: str, mark: pytest.Mark, parsers: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    name = f"{nodeid}: @pytest.mark.{mark.name}"
    if mark.args:
        shown = value_text(mark.args[0])
        raise pytest.UsageError(
            f"{name} takes no positional arguments; found {shown}; write {next(iter(parsers))}={shown}"
        )
    parsed = {}
    for key, value in mark.kwargs.items():
        if key not in parsers:
            raise pytest.UsageError(f"{name} does not take {key}; it takes: {', '.join(parsers)}")
        try:
            parsed[key] = parsers[key](value)
        except ValueError as allowed:
            raise pytest.UsageError(f"{name}: {key} takes {allowed}; found {value_text(value)}") from None
    return parsed
