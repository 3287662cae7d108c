"""Single timed samples, and what still fits into the hard bound."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from pytest_cudagraph.protocols import Clock
from pytest_cudagraph.units import NS_PER_S

ArmName = Literal["eager", "replay", "compiled"]
Call = Callable[[], object]

_FIRST_SHARE = 0.25
"""The share of the time budget that is spent before an open measurement is extended to all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The hard bounds of one measurement, warm-up included: at first ``first_ns``, if still open ``extended_ns``.

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
        """A quarter of the user's time budget first, then all of it."""
        return cls(first_ns=budget_ns * _FIRST_SHARE, extended_ns=budget_ns)


class PerfCounterClock:
    """Python's performance counter."""

    @property
    def resolution_ns(self) -> float:
        """As the operating system states it; the cost of reading it is found by measuring."""
        return time.get_clock_info("perf_counter").resolution * NS_PER_S

    def now_ns(self) -> int:
        """Nanoseconds from an arbitrary start."""
        return time.perf_counter_ns()


@dataclass(slots=True, kw_only=True)
class Timer:
    """Times single samples, and knows what still fits into the bound."""

    calls: Mapping[ArmName, Call]
    clock: Clock
    synchronize: Call
    bounds: Bounds
    prepare: Call | None = None
    """Called before every sample, outside its interval: brings back the state that the calls move on."""
    inner_calls: int = 1
    prepare_ns: float = 0.0
    """How long ``prepare`` took last."""
    extended: bool = False
    start_ns: int = field(init=False)

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
        # An interval below the clock's resolution reads 0, which has no logarithm.
        return max(now_ns() - start_ns, self.clock.resolution_ns, 1.0) / self.inner_calls

    def fits(self, expected_ns: float) -> bool:
        """Whether work of this length ends within the bound; extends the bound once when that is what it takes."""
        end_ns = self.elapsed_ns + expected_ns
        if end_ns <= self.bounds.first_ns:
            return True
        if end_ns > self.bounds.extended_ns:
            return False
        self.extended = True
        return True
