"""How many calls a sample holds, and what follows where not even so many are long enough for the clock."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from pytest_cudagraph.measure.timer import ArmName, Timer
from pytest_cudagraph.protocols import Clock
from pytest_cudagraph.units import latency_text, seconds_text
from pytest_cudagraph.values import Interval

_CLOCK_ERROR = 0.005
"""The largest share of a sample that the clock's resolution and its own cost may be."""

_SLACK = 1.5
"""Samples are not lengthened by less than this, and up to this factor the clock's share may be larger."""

_MAX_INNER_CALLS = 100_000

_UNSEEN_STEP = 10
"""Calls that the clock cannot see at all are shorter than they read, nobody knows by how much: a step at a time."""

_PAIRS_THAT_COUNT = 3
"""One to look at the longer samples, and a quad: what is lengthened so far that no quad fits measures nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TooCoarse:
    """A clock whose error is more than 0.5 % of a sample, with as many calls as there can be: it proves nothing."""

    error_ns: float
    """Of one reading: the resolution, or what reading takes."""
    fastest_ns: float
    """Of both arms, per call."""
    inner_calls: int
    why: str

    @property
    def note(self) -> str:
        """``a clock of 1.0 ms is too coarse for calls of 2.0 µs: ...``."""
        unseen = "at most " if self.fastest_ns * self.inner_calls <= self.error_ns else ""
        calls = f"calls of {unseen}{latency_text(self.fastest_ns)}"
        return f"a clock of {latency_text(self.error_ns)} is too coarse for {calls}: {self.why}"

    def widen(self, speedup: Interval, *, eager_ns: float, replay_ns: float) -> Interval:
        """What the ratio can be if every sample of these levels per call is off by the clock's error."""
        eager, replay = (min(self.error_ns / self.inner_calls / level_ns, 1.0) for level_ns in (eager_ns, replay_ns))
        low = speedup.low * (1.0 - eager) / (1.0 + replay)
        high = speedup.high * (1.0 + eager) / (1.0 - replay) if replay < 1.0 else math.inf
        return Interval(estimate=speedup.estimate, low=low, high=high)


def settle_inner_calls(timer: Timer, level_ns: dict[ArmName, float]) -> TooCoarse | None:
    """Lengthen the samples until the clock is good enough for them; refines ``level_ns``, the time per call.

    Takes a second look after lengthening: a single short call reads no less than the clock's resolution. What would
    not leave room for a quad is not tried. Says so where the samples stay too short.
    """
    needed = _calls_to_try(timer, level_ns)
    # With a state to bring back, a second call in the same interval would start from another one than the first.
    while timer.prepare is None and needed > _SLACK * timer.inner_calls:
        if not timer.fits(_PAIRS_THAT_COUNT * needed * (level_ns["eager"] + level_ns["replay"])):
            bound = seconds_text(timer.bounds.extended_ns)
            why = f"samples of {needed} calls do not fit into the time budget of {bound}"
            return _too_coarse(timer, level_ns, _error_ns(timer.clock), why)
        timer.inner_calls = needed
        level_ns["eager"], level_ns["replay"] = timer.sample_ns("eager"), timer.sample_ns("replay")
        needed = _calls_to_try(timer, level_ns)
    # What reading costs is the same for both arms, and with it a single call may be judged.
    error_ns = timer.clock.resolution_ns
    if error_ns <= _SLACK * _CLOCK_ERROR * timer.inner_calls * _fastest_ns(level_ns):
        return None
    why = "their state is brought back before each" if timer.prepare else f"so are {timer.inner_calls} in a row"
    return _too_coarse(timer, level_ns, error_ns, why)


def inner_calls(clock: Clock, fastest_ns: float) -> int:
    """How many calls make a sample long enough that the clock's own error is below 0.5 %."""
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


def _too_coarse(timer: Timer, level_ns: dict[ArmName, float], error_ns: float, why: str) -> TooCoarse:
    return TooCoarse(error_ns=error_ns, fastest_ns=_fastest_ns(level_ns), inner_calls=timer.inner_calls, why=why)
