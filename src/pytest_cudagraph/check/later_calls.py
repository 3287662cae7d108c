"""Later calls: a replay repeats what Python decided at the capture, so no later call may compute anything else.

Equal calls of the check begin from the same Python values. Here these values run on, and numbers that move with each
call are set forward, to what they would be after up to 100,000 calls more.
"""

from __future__ import annotations

import math
import numbers
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from pytest_cudagraph.backends.device_asserts import TrapGuard
from pytest_cudagraph.check.batch_check import BatchCheck
from pytest_cudagraph.check.compare import Tolerance
from pytest_cudagraph.check.differences import ResultComparison
from pytest_cudagraph.check.initial_state import CallResult, plain_result
from pytest_cudagraph.check.python_places import Place, RanCode, places_of
from pytest_cudagraph.errors import first_line
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.protocols import Backend, CapturedGraph, Model
from pytest_cudagraph.state import Snapshot
from pytest_cudagraph.values import Assigned, Disagreement

SOAK_CALLS = 128
"""Enough for a warm-up of a hundred calls, and for what happens in each call of a hundred."""

_LASTING_CALLS = 32
_LEAST_CALLS = 4
_SOAK_S = 0.5
_STILL_S = 0.1
"""For models whose Python values all stay. Few of them keep state where no walk sees it."""

_DISTANCES = (10, 100, 1_000, 10_000, 100_000)
"""In calls. They pass every limit on the way; single calls are met by the numbers in the source."""

_SLOW_DISTANCES = (1_000, 100_000)
_MOST_DISTANCES = 24
_CALLS_EACH = 2
"""A number may be read before or after the call counts it."""

Places = Mapping[str, Place]


def check_later_calls(check: BatchCheck) -> None:
    """Call eager with live Python values: some calls on, and some from values that come much later."""
    if check.agreed is None:
        return
    later = _LaterCalls(check)
    difference = later.observe() or later.set_forward() or later.call_on()
    if difference is not None:
        check.end_with(difference)
    elif unset := later.not_set_forward():
        check.leave_unjudged(f"calls after the first {later.calls}: {unset} moves with each, and cannot be set forward")


def lasting_difference(
    eager: Model, graph: CapturedGraph, example: Example, backend: Backend, before: Snapshot, *, seed: int,
    rewind: Callable[[], object] | None, is_exact: bool, tolerance: Tolerance,
) -> Disagreement | None:  # fmt: skip
    """Whether eager, whose Python values a measurement moved on by thousands of calls, still agrees with a replay.

    Compares the outputs of at most 32 calls. Tensors that calls write are set back by ``rewind``, and arguments.
    ``is_exact``: the check saw no rounding. Compiled code is not tried, because its random numbers are others.
    """
    if graph.receipt.opaque_regions:
        return None
    arguments, end_s = before.of_extras(), time.perf_counter() + _SOAK_S

    def result(call: Model) -> CallResult:
        arguments.restore()
        if rewind is not None:
            rewind()
        return plain_result(call, example, backend, seed)

    replayed = result(graph)
    comparison = ResultComparison(batch_size=graph.receipt.batch_size, before={}, tolerance=tolerance)
    for number in range(_LASTING_CALLS):
        if number and time.perf_counter() > end_s:
            return None
        now = result(eager)
        difference = (
            comparison.first_difference(now, replayed, {}) if is_exact else comparison.unrepeatable(now, replayed)
        )
        if difference is not None:
            moved = ", ".join(before.changes(values=False).python)
            return replace(
                difference,
                message="eager computes something else after the calls of the measurement, replay repeats the capture",
                evidence=(
                    difference.message,
                    *difference.evidence,
                    *([f"Python values that moved: {moved}"] if moved else []),
                ),
                finding_id="stateful-python",
            )
    return None


@dataclass(slots=True)
class _LaterCalls:
    check: BatchCheck
    ran: RanCode = field(default_factory=RanCode)
    calls: int = 0
    """Eager calls whose Python values ran on."""
    seen: list[Places] = field(default_factory=list)
    """The places after the first three of these calls."""
    call: Callable[[], CallResult] = field(init=False)
    why_stopped: str = ""

    def __post_init__(self) -> None:
        case, agreed = self.check.case, self.check.agreed
        assert agreed is not None
        names = [name for name in agreed.eager.state if name not in agreed.eager.rebound]
        self.call = case.start.live_call(case.eager, agreed.example, agreed.seed, names)

    def observe(self) -> Disagreement | None:
        """Call three times, and note where the numbers are after each."""
        for number in range(3):
            difference = self._next(self.ran.watching() if number == 0 else None)
            self.seen.append(places_of([self.check.case.eager], self.ran))
            if difference is not None or self.why_stopped:
                return difference
        return None

    def call_on(self) -> Disagreement | None:
        """Call until the time is over, which is short for slow models."""
        end_s = time.perf_counter() + (_SOAK_S if self._moved() else _STILL_S)
        while self.calls < SOAK_CALLS and not self.why_stopped:
            if self.calls >= _LEAST_CALLS and time.perf_counter() > end_s:
                return None
            difference = self._next()
            if difference is not None:
                return difference
        return None

    def _next(self, around: AbstractContextManager[None] | None = None) -> Disagreement | None:
        """One more call. The user's model may raise, because its own limit is reached."""
        try:
            with around or nullcontext():
                result = self.call()
        except Exception as error:
            self.why_stopped = f"call {self.calls + 1} raised {first_line(error)}"
            self.check.leave_unjudged(f"later calls: with live Python values, {self.why_stopped}")
            return None
        self.calls += 1
        difference = self._difference(result)
        return (
            None
            if difference is None
            else self._as_later(difference, f"call {self.calls} of equal ones", self._moved())
        )

    def _difference(self, result: CallResult) -> Disagreement | None:
        agreed, comparison = self.check.agreed, self.check.case.comparison
        assert agreed is not None
        first = replace(agreed.eager, state={name: agreed.eager.state[name] for name in result.state})
        if self.check.is_repeatable:
            return comparison.first_difference(first, result, agreed.noise)
        return comparison.unrepeatable(first, result)

    def set_forward(self) -> Disagreement | None:
        """Let all numbers that move evenly be what they are some thousand calls later, for two calls each."""
        moving = self._moving() if len(self.seen) == 3 else {}
        end_s = time.perf_counter() + _SOAK_S
        for count, distance in enumerate(self._distances(moving) if moving else ()):
            if count > len(_SLOW_DISTANCES) and time.perf_counter() > end_s:
                break
            difference = self._at(distance, moving)
            if difference is not None:
                names = [name for name in moving if self._at(distance, {name: moving[name]})] or list(moving)
                later = {name: (self.seen[-1][name].value, moving[name](distance)) for name in names[:1]}
                return self._as_later(difference, f"a call after {distance + 3} equal ones", later)
        return None

    def _at(self, distance: int, moving: Mapping[str, Callable[[float], Any]]) -> Disagreement | None:
        with _set(self.seen[-1], {name: move(distance) for name, move in moving.items()}), suppress(Exception):
            for _ in range(_CALLS_EACH):
                with TrapGuard() if self.check.case.start.may_trap else nullcontext():
                    result = self.call()
                difference = self._difference(result)
                if difference is not None:
                    return difference
        return None

    def _moving(self) -> dict[str, Callable[[float], Any]]:
        """The numbers that moved evenly, or by one factor, each with its value some calls later."""
        forward = {}
        for name, place in self.seen[-1].items():
            values = [places[name].value for places in self.seen if name in places]
            is_settable = len(values) == 3 and place.write is not None and isinstance(place.value, numbers.Number)
            # Numbers of sympy and others have rules of their own.
            if is_settable and type(place.value).__module__ in ("builtins", "numpy"):
                later = _extrapolated(*values)
                if later is not None:
                    forward[name] = later
        return forward

    def _distances(self, moving: Mapping[str, Callable[[float], Any]]) -> list[int]:
        """Some round numbers of calls, and those after which a number is one of the model's source."""
        wanted: set[int] = set()
        for name, move in moving.items():
            value, step = self.seen[-1][name].value, move(1) - self.seen[-1][name].value
            for constant in self._constants(name):
                multiple = (math.floor(value / constant) + 1) * constant
                wanted |= {math.ceil((target - value) / step) - 1 for target in (constant, constant + 1, multiple)}
        if self.check.is_slow:
            return list(_SLOW_DISTANCES)
        near = sorted(distance for distance in wanted if SOAK_CALLS // 2 < distance < 10**7)
        return [*_DISTANCES, *near[: _MOST_DISTANCES - len(_DISTANCES)]]

    def _constants(self, name: str) -> set[float]:
        """The numbers in the source, and in the attributes that the same functions name."""
        leaf = name.rpartition(".")[2].partition("[")[0]
        beside = {key for code in self.ran.functions if leaf in code.co_names for key in code.co_names}
        held = {place.value for key, place in self.seen[-1].items() if key.rpartition(".")[2] in beside - {leaf}}
        return self.ran.constants() | {value for value in held if type(value) in (int, float) and value > 1}

    def _moved(self) -> dict[str, tuple[Any, Any]]:
        """What moved in the last of the three calls: the value before and after it."""
        if len(self.seen) < 2:
            return {}
        before, after = self.seen[-2], self.seen[-1]
        both = ((name, before[name].value, place.value) for name, place in after.items() if name in before)
        return {name: (old, new) for name, old, new in both if _differ(old, new)}

    def not_set_forward(self) -> str:
        """What moves and cannot be set, in words: files, generators, memory of others, the length of a set."""
        if len(self.seen) < 3:
            return ""
        files = [f"the file {file}, which is read" for file in self.ran.files]
        moved = self._moved()
        unset = [name for name in moved if self.seen[-1][name].write is None]
        return ", ".join([*files, *unset])

    def _as_later(self, difference: Disagreement, when: str, moved: Mapping[str, tuple[Any, Any]]) -> Disagreement:
        values = [f"{name}: {_short(old)} -> {_short(new)}" for name, (old, new) in moved.items() if _is_shown(old)]
        return replace(
            difference,
            message=f"eager computes something else in {when}, replay repeats the capture",
            evidence=(
                difference.message,
                *difference.evidence,
                f"Python values that moved: {', '.join(values)}" if values else "no Python value that moved is known",
            ),
            finding_id="stateful-python",
            assigned=tuple(Assigned(name) for name in moved),
        )


def _differ(old: Any, new: Any) -> bool:
    return type(old) is not type(new) or bool(old != new and (old == old or new == new))


def _is_shown(value: Any) -> bool:
    """Numbers. The environment holds secrets."""
    return isinstance(value, numbers.Number)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _extrapolated(first: Any, second: Any, third: Any) -> Callable[[float], Any] | None:
    """The value some calls after the third. None for what stays, and for what moves unevenly: times, identities."""
    step = third - second
    if step == 0:
        return None
    if _is_near(step, second - first):
        return lambda calls: third + step * calls
    if second and first and _is_near(third / second, second / first) and not isinstance(third, int):
        return lambda calls: third * (third / second) ** calls
    return None


def _is_near(one: Any, other: Any) -> bool:
    return bool(abs(one - other) <= 1e-6 * abs(one))


@contextmanager
def _set(places: Places, values: Mapping[str, Any]) -> Iterator[None]:
    """Set these places, and set them back."""
    try:
        for name, value in values.items():
            write = places[name].write
            if write is not None:
                write(value)
        yield
    finally:
        for name in values:
            write = places[name].write
            if write is not None:
                write(places[name].value)
