"""Cells of scenario and true speedup, their tallies, and the work on them by several processes."""

from __future__ import annotations

import gc
import math
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from benchmarks.error_rates.scenarios import Scenario, all_scenarios
from benchmarks.error_rates.trial import Found, run_trial

from pytest_cudagraph.values import Verdict

RELATIVES = (1.10, 1.05, 1.02, 1.01, 1.00, 0.99, 0.98, 0.95, 0.90)
"""True speedups, in multiples of the threshold."""

PASS_TRIALS = 20
"""So many trials of every cell, then as many of every cell again: a run that is cut short has some of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    scenario: Scenario
    relative: float

    @property
    def name(self) -> str:
        return f"{self.scenario.name} at {self.relative:.2f}"


@dataclass(slots=True, kw_only=True)
class Tally:
    """What the trials of one cell, or of several, ended with."""

    verdicts: Counter[Verdict] = field(default_factory=Counter)
    calls: Counter[int] = field(default_factory=Counter)
    """To two digits."""
    spent_ms: Counter[int] = field(default_factory=Counter)
    """Rounded up to 5 ms, beyond a second to 50 ms."""
    peer_min_passes: int = 0
    peer_median_passes: int = 0

    @property
    def trials(self) -> int:
        return self.verdicts.total()

    def add(self, found: Found) -> None:
        self.verdicts[found.verdict] += 1
        self.calls[_two_digits(found.calls)] += 1
        self.spent_ms[_step_ms(found.spent_ns / 1e6)] += 1
        self.peer_min_passes += found.peer_min_passes
        self.peer_median_passes += found.peer_median_passes

    def merge(self, other: Tally) -> None:
        self.verdicts.update(other.verdicts)
        self.calls.update(other.calls)
        self.spent_ms.update(other.spent_ms)
        self.peer_min_passes += other.peer_min_passes
        self.peer_median_passes += other.peer_median_passes


def _two_digits(count: int) -> int:
    step = 10 ** max(0, len(str(count)) - 2)
    return round(count / step) * step


def _step_ms(spent_ms: float) -> int:
    step = 5 if spent_ms <= 1000 else 50
    return math.ceil(spent_ms / step) * step


def quantile_of(counts: Mapping[int, int], fraction: float) -> int:
    """The value that this share of all does not exceed."""
    left = fraction * sum(counts.values())
    for value in sorted(counts):
        left -= counts[value]
        if left <= 0:
            return value
    raise ValueError("a quantile needs at least one value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One cell's share of a pass, small enough to be sent to a process."""

    scenario: str
    relative: float
    numbers: range
    seed: int
    budget_ns: float


def all_cells(pattern: str = "") -> list[Cell]:
    """Every scenario whose name or group contains ``pattern``, at every true speedup."""
    scenarios = [s for s in all_scenarios() if pattern in f"{s.name} {s.group}"]
    return [Cell(scenario=scenario, relative=relative) for scenario in scenarios for relative in RELATIVES]


def wanted(cell: Cell, trials: int) -> int:
    """How many of ``trials`` this cell gets: those of the shortest calls cost most, and say the least."""
    return max(1, math.ceil(trials * cell.scenario.trials_share))


def run_cells(
    cells: Sequence[Cell],
    tallies: dict[str, Tally],
    *,
    trials: int,
    seed: int,
    budget_ns: float,
    jobs: int,
    passed: Callable[[], None],
) -> None:
    """Bring every cell to ``trials`` trials, pass by pass; neither ``jobs`` nor interruptions change the outcome."""
    with _pool(jobs) as mapped:
        for upto in [*range(PASS_TRIALS, trials, PASS_TRIALS), trials]:
            work = []
            for cell in cells:
                numbers = range(tallies.setdefault(cell.name, Tally()).trials, wanted(cell, upto))
                name, relative = cell.scenario.name, cell.relative
                work.append(Work(scenario=name, relative=relative, numbers=numbers, seed=seed, budget_ns=budget_ns))
            # The slowest first, so that no process is left alone with them.
            some = sorted(filter(lambda each: each.numbers, work), key=lambda each: abs(each.relative - 1))
            for cell_name, tally in mapped(some):
                tallies[cell_name].merge(tally)
            if some:
                passed()


Results = Iterator[tuple[str, Tally]]


@contextmanager
def _pool(jobs: int) -> Iterator[Callable[[Sequence[Work]], Results]]:
    """A function that works off a list, in this process or in several."""
    if jobs == 1:
        _settle()
        yield lambda work: map(_run, work)
        gc.unfreeze()
        return
    with multiprocessing.get_context("spawn").Pool(jobs, initializer=_settle) as pool:
        yield lambda work: pool.imap_unordered(_run, work)


def _settle() -> None:
    # The loop collects garbage before it measures; what was imported need not be looked through each time.
    gc.collect()
    gc.freeze()


def _run(work: Work) -> tuple[str, Tally]:
    scenario = next(scenario for scenario in all_scenarios() if scenario.name == work.scenario)
    tally = Tally()
    for number in work.numbers:
        tally.add(run_trial(scenario, work.relative, number, seed=work.seed, budget_ns=work.budget_ns))
    return Cell(scenario=scenario, relative=work.relative).name, tally
