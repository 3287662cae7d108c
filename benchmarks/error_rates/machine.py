"""A machine that does not exist: a clock that only its calls move, and two arms that take their time from a tape.

A *tape* is an endless iterator of slots ``(eager_ns, replay_ns)``: how long the next call takes, whichever arm it is
of. Both arms read one tape, as both run on one machine: what disturbs it falls on whoever runs just then. Where noise
belongs to an arm (a cold start), each arm reads a tape of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from pytest_cudagraph.measure import Arms

Tape = Iterator[tuple[float, float]]


class SimulatedClock:
    """Nanoseconds that pass only in calls, read in steps of ``resolution_ns``."""

    __slots__ = ("_step_ns", "cpu_ns", "resolution_ns", "time_ns")

    def __init__(self, resolution_ns: float, step_ns: int = 1) -> None:
        self.resolution_ns = resolution_ns
        self.time_ns = self.cpu_ns = 0.0
        self._step_ns = step_ns

    def now_ns(self) -> int:
        reading_ns = int(self.time_ns)
        return reading_ns - reading_ns % self._step_ns

    def cpu_time_ns(self) -> int:
        """Of the calls, without their waits."""
        return int(self.cpu_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The clock and the tapes of one trial."""

    clock: SimulatedClock
    eager: Tape
    replay: Tape
    longest_work_ns: float = math.inf
    """What a call takes beyond that is a wait for a CPU."""

    def arms(self) -> Arms:
        """Two calls that do nothing but let their time pass."""
        clock, next_eager, next_replay = self.clock, self.eager.__next__, self.replay.__next__
        longest_work_ns = self.longest_work_ns

        def pass_time(taken_ns: float) -> None:
            clock.time_ns += taken_ns
            clock.cpu_ns += min(taken_ns, longest_work_ns)

        def eager() -> None:
            pass_time(next_eager()[0])

        def replay() -> None:
            pass_time(next_replay()[1])

        return Arms(eager=eager, replay=replay)
