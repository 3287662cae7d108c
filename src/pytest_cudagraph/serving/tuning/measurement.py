"""The measuring of a grid: its races, on one clock, without the rounds of a disturbed device."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Literal, cast

from pytest_cudagraph.errors import InputError
from pytest_cudagraph.foreign import value_text
from pytest_cudagraph.gc_pause import gc_paused
from pytest_cudagraph.measure import Bounds, PerfCounterClock
from pytest_cudagraph.measure.sampling import Disturbance, HealthFilter
from pytest_cudagraph.measure.timer import ArmName, Timer, inner_calls, warm_up
from pytest_cudagraph.monitor import PerfMonitor
from pytest_cudagraph.protocols import Backend
from pytest_cudagraph.serving.tuning.grid import Combination, PreparedGrid
from pytest_cudagraph.serving.tuning.race import LEAST_ROUNDS, RaceResult, race
from pytest_cudagraph.serving.tuning.report import of_size
from pytest_cudagraph.stats import summaries
from pytest_cudagraph.units import NS_PER_S, plural, seconds_text

Objective = Literal["latency", "throughput"] | Callable[[int, float], float]
"""What is minimised: ns per call, ns per row, or a function of batch size and latency (ns) with a result above 0."""

_FINAL_SHARE = 0.2
"""Of the time budget, for the race between the best of each batch size."""
_LEAST_NS = 0.25 * NS_PER_S
_MOST_READINGS = 4
"""Of one combination in one round. Their lower quartile counts, as in a block of the speed gate. Slow calls have less,
so that ten rounds fit into the time budget."""

_log = logging.getLogger("pytest_cudagraph.serving")


class GridMeasurement:
    """The races of one grid: one for each batch size, then one of their winners."""

    def __init__(
        self,
        prepared: PreparedGrid,
        objective: Objective,
        tolerance: float,
        budget_ns: float,
        seed: int,
    ) -> None:
        self._prepared, self.objective, self.tolerance = prepared, objective, tolerance
        self.health = HealthFilter()
        self._pending: list[Combination] = []
        self._budget_ns, self._seed, self._clock = budget_ns, seed, PerfCounterClock()
        self._timers: dict[int, Timer] = {}
        self._sample_ns: dict[Combination, float] = {}
        self._readings = _MOST_READINGS
        self.over_budget = ""
        """Why the time budget cannot be kept; empty if it can."""
        self.latencies_ns: dict[Combination, list[float]] = {combination: [] for combination in prepared.ready}
        self.heats: dict[int, RaceResult[Combination]] = {}
        self.final: RaceResult[Combination] | None = None
        self.measure_ns = 0.0

    def run(self) -> None:
        """Measure everything that is ready."""
        sizes = sorted({combination.batch_size for combination in self._prepared.ready})
        if not sizes:
            return
        begin_ns = time.perf_counter_ns()
        with (
            _disturbance_of(self._prepared.grid.backend) as disturbance,
            self._prepared.timing() as prepare,
            gc_paused(),
        ):
            self.health.disturbance = disturbance
            for size in sizes:
                self._prepared.grid.progress(f"warm up batch {size}")
                self._timers[size] = self._timer(size, self._budget_ns / len(sizes), prepare)
            left_ns = max(self._budget_ns - (time.perf_counter_ns() - begin_ns), 0.0)
            self._tell_the_least_time(left_ns)
            final_ns = left_ns * _FINAL_SHARE if len(sizes) > 1 else 0.0
            for size in sizes:
                self._prepared.grid.progress(f"measure batch {size}")
                heat = self._race(of_size(self._prepared.ready, size), (left_ns - final_ns) / len(sizes))
                if heat is None:
                    self._leave_out(size)
                else:
                    self.heats[size] = heat
            if len(self.heats) > 1:
                self._prepared.grid.progress("measure the best of each batch size")
                winners = [heat.best for heat in self.heats.values()]
                self.final = self._race(winners, final_ns)
        self.measure_ns = time.perf_counter_ns() - begin_ns

    def _tell_the_least_time(self, left_ns: float) -> None:
        """Say before the first round if ten rounds of one reading do not fit into what warm-up left of the budget."""
        least_ns = LEAST_ROUNDS * sum(self._sample_ns.values())
        if least_ns > left_ns:
            self.over_budget = (
                f"ten rounds of {plural(len(self._sample_ns), 'combination')} take some {seconds_text(least_ns)}, more "
                f"than the time budget of {seconds_text(self._budget_ns)}: tune fewer combinations, or give it more"
            )
            self._prepared.grid.progress(self.over_budget)
            _log.warning("%s", self.over_budget)

    def _leave_out(self, size: int) -> None:
        """No combination of a batch size may win that was measured on a disturbed device only."""
        for combination in of_size(self._prepared.ready, size):
            self._prepared.failed[combination] = (
                f"the device was disturbed all the time: {', '.join(self.health.reasons)}"
            )
            del self._prepared.ready[combination]

    @property
    def best(self) -> Combination | None:
        """The best of all. None if the last race had a disturbed device only."""
        last = self.final if len(self.heats) > 1 else next(iter(self.heats.values()), None)
        return last.best if last else None

    @property
    def is_decided(self) -> bool:
        """Whether no race ended with an undecided place."""
        races = [*self.heats.values(), *([self.final] if self.final else [])]
        return self.best is not None and not any("undecided" in each.places.values() for each in races)

    def cost(self, combination: Combination, latency_ns: float) -> float:
        """By the objective. Raises :class:`~pytest_cudagraph.errors.InputError` for one that is not above zero."""
        if self.objective == "latency":
            return latency_ns
        if self.objective == "throughput":
            return latency_ns / combination.batch_size
        cost = self.objective(combination.batch_size, latency_ns)
        if not 0.0 < cost < math.inf:
            raise InputError(f"an objective gives a finite number above 0; found {value_text(cost)} for {combination}")
        return float(cost)

    def _timer(self, size: int, share_ns: float, prepare: Callable[[], object] | None) -> Timer:
        ready = self._prepared.ready
        timer = Timer(
            calls={_arm(combination): ready[combination].call for combination in of_size(ready, size)},
            clock=self._clock,
            synchronize=self._prepared.grid.backend.synchronize,
            bounds=Bounds.of_budget(share_ns),
            prepare=prepare,
        )
        warm_ns = warm_up(timer)
        if prepare is None:  # a second call would not start from the restored state
            timer.inner_calls = inner_calls(self._clock, min(min(each) for each in warm_ns.values()))
        for combination in of_size(ready, size):
            call_ns = median(warm_ns[_arm(combination)][1:] or warm_ns[_arm(combination)])
            self._sample_ns[combination] = call_ns * timer.inner_calls + timer.prepare_ns
        return timer

    def _race(self, candidates: list[Combination], budget_ns: float) -> RaceResult[Combination] | None:
        begin_ns = time.perf_counter_ns()
        fitting = budget_ns / (LEAST_ROUNDS * sum(self._sample_ns[each] for each in candidates))
        self._readings = min(max(int(fitting), 1), _MOST_READINGS)
        # A decision after less would fall within one burst of a noisy neighbour (docs/statistics.md).
        least_ns = min(_LEAST_NS, budget_ns / 4)
        return race(
            candidates,
            self._sample,
            may_settle=lambda: time.perf_counter_ns() - begin_ns >= least_ns,
            counts=self._counts,
            is_over=lambda rounds: time.perf_counter_ns() - begin_ns >= budget_ns,
            seed=self._seed,
            # The best of all is within it of the best of its batch size, which is within it of the others.
            tolerance=self.tolerance / 2,
        )

    def _counts(self, pending: int) -> bool | None:
        """Whether the pending rounds were undisturbed. None before it is time to ask."""
        now_ns = time.perf_counter_ns()
        if not self.health.is_due(now_ns):
            return None
        counted, taken, self._pending = self.health.accepts(pending, now_ns), self._pending, []
        for combination in taken if not counted else ():
            self.latencies_ns[combination].pop()
        return counted

    def _sample(self, combination: Combination) -> float:
        timer = self._timers[combination.batch_size]
        latency_ns = summaries.quantile([timer.sample_ns(_arm(combination)) for _ in range(self._readings)], 0.25)
        self.latencies_ns[combination].append(latency_ns)
        self._pending.append(combination)
        return self.cost(combination, latency_ns)


def _arm(combination: Combination) -> ArmName:
    return cast(ArmName, str(combination))


@contextmanager
def _disturbance_of(backend: Backend) -> Iterator[Disturbance | None]:
    """What tells of a throttled or shared GPU. None on a CPU, whose clocks and neighbours are everyday noise."""
    with PerfMonitor() as watch:
        yield watch.check if backend.kind == "cuda" else None
