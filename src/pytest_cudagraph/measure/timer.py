"""Single timed samples: warm-up, the number of calls in a sample, and the hard bound."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from pytest_cudagraph.errors import CudagraphError
from pytest_cudagraph.protocols import Clock
from pytest_cudagraph.stats import summaries
from pytest_cudagraph.units import NS_PER_S, latency_text, seconds_text
from pytest_cudagraph.values import Interval

ArmName = Literal["eager", "replay", "compiled"]
Call = Callable[[], object]

_STOPPED_CALLS = 1_000_000
"""A call takes a microsecond at least, and no clock is coarser than 16 ms: some ten thousand calls."""

_FIRST_SHARE = 0.25
"""The share of the time budget that a measurement may take without extension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The hard bounds of one measurement with its warm-up: ``first_ns``, and ``extended_ns`` if it is still open.

    Raises :class:`ValueError` unless ``0 < first_ns <= extended_ns``.
    """

    first_ns: float
    extended_ns: float

    def __post_init__(self) -> None:
        if not 0 < self.first_ns <= self.extended_ns:
            raise ValueError(
                f"bounds must satisfy 0 < first <= extended, not {self.first_ns} and {self.extended_ns} ns"
            )

    @classmethod
    def of_budget(cls, budget_ns: float) -> Bounds:
        """Bounds of a quarter and of all of the user's time budget."""
        return cls(first_ns=budget_ns * _FIRST_SHARE, extended_ns=budget_ns)


class PerfCounterClock:
    """Python's performance counter."""

    @property
    def resolution_ns(self) -> float:
        """The resolution that the operating system states, without the cost of reading."""
        return time.get_clock_info("perf_counter").resolution * NS_PER_S

    now_ns = staticmethod(time.perf_counter_ns)
    """Nanoseconds from an arbitrary start. Taken here, so that a test that freezes the time cannot stop a bound."""

    cpu_time_ns = staticmethod(time.thread_time_ns)


@dataclass(slots=True, kw_only=True)
class Timer:
    """Times single samples, and tells whether more fit into the bound."""

    calls: Mapping[ArmName, Call]
    clock: Clock
    synchronize: Call
    bounds: Bounds
    prepare: Call | None = None
    """Called before every sample, outside its interval: restores the state that the calls change."""
    inner_calls: int = 1
    prepare_ns: float = 0.0
    """The last duration of ``prepare``."""
    extended: bool = False
    start_ns: int = field(init=False)
    calls_without_time: int = 0
    """Calls in a row during which the clock did not move."""

    def __post_init__(self) -> None:
        self.start_ns = self.clock.now_ns()

    @property
    def elapsed_ns(self) -> int:
        return self.clock.now_ns() - self.start_ns

    def sample_ns(self, name: ArmName) -> float:
        """One timed interval, divided by the calls in it."""
        call, now_ns, repeats = self.calls[name], self.clock.now_ns, itertools.repeat(None, self.inner_calls)
        if self.prepare is not None:
            begin_ns = now_ns()
            self.prepare()
            self.prepare_ns = now_ns() - begin_ns
        self.synchronize()
        start_ns = now_ns()
        for _ in repeats:
            call()
        self.synchronize()
        elapsed_ns = now_ns() - start_ns
        if not elapsed_ns:
            self._count_without_time()
        else:
            self.calls_without_time = 0
        # An interval below the clock's resolution reads 0, which has no logarithm.
        return max(elapsed_ns, self.clock.resolution_ns, 1.0) / self.inner_calls

    def _count_without_time(self) -> None:
        self.calls_without_time += self.inner_calls
        if self.calls_without_time >= _STOPPED_CALLS:
            raise CudagraphError(
                f"a measurement needs a clock that advances; {type(self.clock).__name__} stood still for "
                f"{_STOPPED_CALLS} calls: something replaced time.perf_counter_ns before this plugin was loaded "
                "(freezegun, a mock); measure outside of it"
            )

    def fits(self, expected_ns: float) -> bool:
        """Whether work of this duration ends within the bound; extends the bound once if that is enough."""
        end_ns = self.elapsed_ns + expected_ns
        if end_ns <= self.bounds.first_ns:
            return True
        if end_ns > self.bounds.extended_ns:
            return False
        self.extended = True
        return True


WINDOW = 5
"""Calls per window; the second fastest is the level of a window."""

_SHARE = 0.2
"""The share of the hard bound that warm-up may take."""

_GAIN = 0.01
"""A window must be faster by more than this to count as a gain."""

_WINDOWS_WITHOUT_GAIN = 3


def warm_up(timer: Timer) -> dict[ArmName, list[float]]:
    """Run windows of 5 calls per arm until neither has become faster, by more than 1 % in all, for three windows.

    Small gains add up, so a slow warm-up is awaited; noise has no direction and is not. Takes at most a fifth of the
    hard bound. But every arm runs once, and twice if the hard bound allows, because a first call does not predict the
    next. Returns the samples in ns per call.
    """
    seen_ns = {name: [timer.sample_ns(name)] for name in timer.calls}
    for name, samples_ns in seen_ns.items():
        _call_until(timer, name, samples_ns, calls=1, limit_ns=timer.bounds.extended_ns)
    best_ns: dict[ArmName, float] = dict.fromkeys(seen_ns, math.inf)
    standing = -1
    while standing < _WINDOWS_WITHOUT_GAIN:
        standing += 1
        for name, samples_ns in seen_ns.items():
            if not _call_until(timer, name, samples_ns, calls=WINDOW, limit_ns=timer.bounds.extended_ns * _SHARE):
                return seen_ns
            level_ns = summaries.quantile(samples_ns[-WINDOW:], 0.25)
            if level_ns < best_ns[name] * (1.0 - _GAIN):
                best_ns[name], standing = level_ns, 0
    return seen_ns


def _call_until(timer: Timer, name: ArmName, samples_ns: list[float], *, calls: int, limit_ns: float) -> bool:
    """Add samples; False if the limit left no time for all of them."""
    for _ in range(calls):
        if timer.elapsed_ns + timer.prepare_ns + samples_ns[-1] > limit_ns:
            return False
        samples_ns.append(timer.sample_ns(name))
    return True


_CLOCK_ERROR = 0.005
"""The largest share of a sample for the resolution and the own cost of the clock."""

_SLACK = 1.5
"""The smallest factor to lengthen samples by. Up to it, the clock's share may be larger."""

_MAX_INNER_CALLS = 100_000

_UNSEEN_STEP = 10
"""Calls below the clock's resolution are shorter than they read, so samples are lengthened in steps."""

_PAIRS_THAT_COUNT = 3
"""One pair to time the longer samples, and two for a quad, which must still fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockTooCoarse:
    """A clock whose error exceeds 0.5 % of even the longest possible sample, so that there is no verdict."""

    error_ns: float
    """The error of one reading: the resolution, or the time to read."""
    fastest_ns: float
    """The latency of the faster arm, per call."""
    inner_calls: int
    why: str

    @property
    def note(self) -> str:
        """``a clock of 1.0 ms is too coarse for calls of 2.0 µs: ...``."""
        unseen = "at most " if self.fastest_ns * self.inner_calls <= self.error_ns else ""
        calls = f"calls of {unseen}{latency_text(self.fastest_ns)}"
        return f"a clock of {latency_text(self.error_ns)} is too coarse for {calls}: {self.why}"

    def widen(self, speedup: Interval, *, eager_ns: float, replay_ns: float) -> Interval:
        """The interval if every sample at these latencies per call is wrong by the clock's error."""
        eager, replay = (min(self.error_ns / self.inner_calls / level_ns, 1.0) for level_ns in (eager_ns, replay_ns))
        low = speedup.low * (1.0 - eager) / (1.0 + replay)
        high = speedup.high * (1.0 + eager) / (1.0 - replay) if replay < 1.0 else math.inf
        return Interval(estimate=speedup.estimate, low=low, high=high)


def calibrate_inner_calls(timer: Timer, level_ns: dict[ArmName, float]) -> ClockTooCoarse | None:
    """Lengthen the samples until the clock is precise enough for them; updates ``level_ns``, the time per call.

    Longer samples are timed again, because a short call reads at least the clock's resolution. A length that leaves no
    time for a quad is not tried. Returns None unless the samples stay too short.
    """
    needed = _calls_to_try(timer, level_ns)
    # With ``prepare``, a second call in the same interval would not start from the restored state.
    while timer.prepare is None and needed > _SLACK * timer.inner_calls:
        if not timer.fits(_PAIRS_THAT_COUNT * needed * (level_ns["eager"] + level_ns["replay"])):
            bound = seconds_text(timer.bounds.extended_ns)
            why = f"samples of {needed} calls do not fit into the time budget of {bound}"
            return _too_coarse(timer, level_ns, _error_ns(timer.clock), why)
        timer.inner_calls = needed
        level_ns["eager"], level_ns["replay"] = timer.sample_ns("eager"), timer.sample_ns("replay")
        needed = _calls_to_try(timer, level_ns)
    # The cost of reading is the same for both arms. So only the resolution counts here.
    error_ns = timer.clock.resolution_ns
    if error_ns <= _SLACK * _CLOCK_ERROR * timer.inner_calls * _fastest_ns(level_ns):
        return None
    why = "their state is restored before each" if timer.prepare else f"so are {timer.inner_calls} in a row"
    return _too_coarse(timer, level_ns, error_ns, why)


def inner_calls(clock: Clock, fastest_ns: float) -> int:
    """The number of calls in a sample that keeps the clock's error below 0.5 %."""
    return min(max(math.ceil(_error_ns(clock) / _CLOCK_ERROR / fastest_ns), 1), _MAX_INNER_CALLS)


def _calls_to_try(timer: Timer, level_ns: dict[ArmName, float]) -> int:
    fastest_ns = _fastest_ns(level_ns)
    needed = inner_calls(timer.clock, fastest_ns)
    is_unseen = fastest_ns * timer.inner_calls <= timer.clock.resolution_ns
    return min(needed, _UNSEEN_STEP * timer.inner_calls) if is_unseen else needed


def _error_ns(clock: Clock) -> float:
    readings_ns = [clock.now_ns() for _ in range(32)]
    return max(clock.resolution_ns, min(later - earlier for earlier, later in itertools.pairwise(readings_ns)))


def _fastest_ns(level_ns: dict[ArmName, float]) -> float:
    return min(level_ns["eager"], level_ns["replay"])


def _too_coarse(timer: Timer, level_ns: dict[ArmName, float], error_ns: float, why: str) -> ClockTooCoarse:
    return ClockTooCoarse(error_ns=error_ns, fastest_ns=_fastest_ns(level_ns), inner_calls=timer.inner_calls, why=why)
