"""The marks ``graph_speedup``, ``decode`` and ``workload``, parsed at collection.

Errors name the node, the value and what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from pytest_cudagraph.foreign import value_text
from pytest_cudagraph.settings.options import DeviceOption
from pytest_cudagraph.settings.parsing import (
    DEVICES,
    check_covered,
    device_of,
    distinct_sizes,
    flag,
    fraction,
    lengths,
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
    DECODE_FIXTURES,
    DECODE_MARK,
    FIXTURES,
    MARK,
    WORKLOAD_FIXTURES,
    WORKLOAD_MARK,
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
_SHARED = ("max_slowdown", "batch_sizes", "device", "rtol", "atol", "time_budget")
DECODE_PARSERS: dict[str, Callable[[Any], Any]] = {
    "min_speedup": min_speedups,
    "prompt_lengths": lengths(least=1),
    "output_lengths": lengths(least=2),
    "exact": flag,
    **{key: MARK_PARSERS[key] for key in _SHARED},
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
    prompt_lengths: tuple[int, ...] | None = None
    output_lengths: tuple[int, ...] | None = None
    exact: bool | None = None
    workload: Workload | None = None


def read_marks(item: pytest.Item) -> MarkSettings:
    """Read the marks of one test. Raises :class:`pytest.UsageError` for any mistake."""
    given = [mark for mark in (MARK, DECODE_MARK) if item.get_closest_marker(mark) is not None]
    if len(given) > 1:
        raise pytest.UsageError(
            f"{item.nodeid}: a test has @pytest.mark.{MARK} or @pytest.mark.{DECODE_MARK}, not both"
        )
    workload = _workload_of(item)
    if given == [DECODE_MARK]:
        merged = _merged(item, DECODE_MARK, DECODE_PARSERS, DECODE_FIXTURES)
        least = {"min": merged.pop("min_speedup")} if "min_speedup" in merged else {}
        return MarkSettings(workload=workload, **least, **merged)
    return MarkSettings(workload=workload, **_merged(item, MARK, MARK_PARSERS, FIXTURES))


def _workload_of(item: pytest.Item) -> Workload | None:
    """Parametrised cases of one function are a group, unless the mark says otherwise."""
    given = _merged(item, WORKLOAD_MARK, WORKLOAD_PARSERS, WORKLOAD_FIXTURES)
    if item.get_closest_marker(WORKLOAD_MARK) is None:
        return None
    parameters = getattr(getattr(item, "callspec", None), "id", "")
    function = item.nodeid.removesuffix(f"[{parameters}]")
    return Workload(given.get("group", function), given.get("name", parameters or item.name))


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
        found = value_text(mark.args[0])
        raise pytest.UsageError(
            f"{name} takes no positional arguments; found {found}; write {next(iter(parsers))}={found}"
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
