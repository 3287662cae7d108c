"""The tuner on a simulated clock: its measuring, choice, report and ``expect_best``, on 20 grids of known truth.

Five models of noise: quiet (1 %), busy (two speeds, 1.7x, each for some 60 to 120 ms), preempted (1 to 6 ms lost every
4 ms), drift (40 % slower and back, over seconds), and busy and preempted together. Exits 1 if a choice is more than 2 %
worse than the best, if ``expect_best(within=0.03)`` fails for a saved choice that is within 1 % of the best, or if a
line says ``ties`` of a combination that it shows beyond the tolerance.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pytest_cudagraph.errors import ExpectationMissed, InconclusiveWarning
from pytest_cudagraph.serving.tuning import measurement, tuner
from pytest_cudagraph.serving.tuning.grid import Combination, ReadyCombination
from pytest_cudagraph.serving.tuning.report import TuningReport

Truth = dict[Combination, float]
"""ns of a call."""
KEYS = [
    Combination(size, mode, graph)
    for size, mode, graph in itertools.product((1, 2, 4, 8), ("none", "inductor"), (True, False))
]
MOST_REGRET, TOLERANCE, BUDGET_S = 0.02, 0.02, 2.0
NOISES = ("quiet", "busy", "preempted", "drift", "busy and preempted")


class Clock:
    """Simulated ns. A reading takes 25 ns."""

    resolution_ns, now = 1.0, 1e9

    def now_ns(self) -> int:
        self.now += 25
        return int(self.now)

    cpu_time_ns = now_ns


class Noise:
    """What a call of some ns takes at this moment."""

    def __init__(self, kind: str, seed: int, clock: Clock) -> None:
        self._kind, self._draw, self._clock = kind, random.Random(seed), clock
        self._until = self._next = 0.0
        self._speed = 1.0

    def __call__(self, ns: float) -> float:
        now, draw = self._clock.now, self._draw
        factor, extra = math.exp(draw.gauss(0, 0.01)), 0.0
        if "busy" in self._kind:
            if now > self._until:
                self._speed = 1.7 if self._speed == 1.0 else 1.0
                self._until = now + draw.expovariate(1 / (60e6 if self._speed > 1 else 120e6))
            factor *= self._speed
        if self._kind == "drift":
            factor *= 1 + 0.4 * abs(math.sin(now / 3e9))
        if "preempted" in self._kind and now > self._next:
            self._next, extra = now + draw.expovariate(1 / 4e6), draw.uniform(1e6, 6e6)
        return ns * factor + extra


def grids() -> dict[str, Truth]:
    """20 grids: equal, nearly equal, one better, one factor, interactions, fast and slow calls, random."""
    draw = random.Random(7)

    def of(cost_ns: Callable[[int, str, bool], float]) -> Truth:
        return {key: cost_ns(*key) for key in KEYS}

    made = {
        "equal per row": of(lambda size, mode, graph: 50e3 * size),
        "equal": of(lambda size, mode, graph: 50e3),
        "steps of 1 %": {key: 50e3 * key.batch_size * 1.01**at for at, key in enumerate(KEYS)},
        "graph": of(lambda size, mode, graph: 20e3 * size * (1 if graph else 1.5)),
        "batch size": of(lambda size, mode, graph: 20e3 * size**0.5),
        "one by 3 %": of(lambda *key: 40e3 * key[0] * (0.97 if key == (4, "inductor", True) else 1)),
        "one by 5 %": of(lambda *key: 40e3 * key[0] * (0.95 if key == (2, "none", False) else 1)),
        "interaction": of(lambda size, mode, graph: 30e3 * size * (1.2 if (mode == "none") == graph else 1)),
        "2 us": of(lambda size, mode, graph: 2e3 * size * (1 if graph else 1.04)),
        "20 ms": of(lambda size, mode, graph: 20e6 * size * (1 if graph else 1.04)),
    }
    for number in range(10):
        spreads = {key: math.exp(draw.gauss(0, draw.choice((0.01, 0.03, 0.2)))) for key in KEYS}
        made[f"random {number}"] = {
            key: 30e3 * key.batch_size ** draw.uniform(0.5, 1) * spread for key, spread in spreads.items()
        }
    return made


def tuned(truth: Truth, kind: str, seed: int) -> TuningReport:
    """The product's measurement and report of a grid, on the simulated clock."""
    clock = Clock()
    noise = Noise(kind, seed, clock)

    def call_of(key: Combination) -> Callable[[], None]:
        def call() -> None:
            clock.now += noise(truth[key])

        return call

    @contextlib.contextmanager
    def timing() -> Iterator[None]:
        yield None

    backend = SimpleNamespace(kind="cpu", synchronize=lambda: None)
    grid = SimpleNamespace(backend=backend, progress=lambda line: None, combinations=KEYS, model=tuned)
    prepared: Any = SimpleNamespace(
        ready={key: ReadyCombination(combination=key, call=call_of(key), memory_bytes=0) for key in KEYS},
        failed={}, grid=grid, timing=timing,
    )  # fmt: skip
    with _clock_of_the_tuner(clock):
        measured = measurement.GridMeasurement(prepared, "throughput", TOLERANCE, BUDGET_S * 1e9, seed)
        measured.run()
    return tuner._report("simulated", prepared, measured)


@contextlib.contextmanager
def _clock_of_the_tuner(clock: Clock) -> Iterator[None]:
    held = measurement.PerfCounterClock, measurement.time
    measurement.PerfCounterClock = lambda: clock  # type: ignore[assignment, misc]
    measurement.time = SimpleNamespace(perf_counter_ns=clock.now_ns)  # type: ignore[assignment]
    try:
        yield
    finally:
        measurement.PerfCounterClock, measurement.time = held  # type: ignore[misc]


def judge(truth: Truth, kind: str, seed: int) -> Counter[str]:
    """One run, and a later one that holds its saved choice."""
    report, counts = tuned(truth, kind, seed), Counter(runs=1)
    per_row = {key: ns / key.batch_size for key, ns in truth.items()}
    assert report.best is not None
    counts["wrong"] = per_row[report.best.combination] > (1 + MOST_REGRET) * min(per_row.values())
    counts["undecided"] = not report.is_best_decided
    counts["over the budget, told"] = bool(report.notes[:-1])
    counts["over the budget, not told"] = report.measure_ns > 1.1e9 * BUDGET_S and not report.notes[:-1]
    for each in report.combinations:
        behind = (each.cost or 0.0) / (report.best_of[each.combination.batch_size].cost or 1.0)
        counts["ties beyond the tolerance"] |= each.place == "ties" and behind > 1 + TOLERANCE
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tuned.json"
        report.save(path)
        again = tuned(truth, kind, seed + 77)
        slack = max(
            per_row[best.combination] / min(ns for key, ns in per_row.items() if key.batch_size == size)
            for size, best in report.best_of.items()
        )
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", InconclusiveWarning)
            try:
                again.expect_best(path, within=0.03)
            except ExpectationMissed:
                counts["expect_best false"] = slack <= 1.01
        counts["expect_best not proven"] = bool(told)
    counts.update(_planted(again, truth))
    return counts


def _planted(report: TuningReport, truth: Truth) -> Counter[str]:
    """How often ``expect_best`` finds a saved choice that is the worst of its batch size, by at least 10 %."""
    counts: Counter[str] = Counter()
    for size in report.best_of:
        of_size = [each for each in report.combinations if each.combination.batch_size == size]
        worst = max(of_size, key=lambda each: truth[each.combination])
        if truth[worst.combination] < 1.1 * min(truth[each.combination] for each in of_size):
            continue
        counts["planted"] += 1
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore", InconclusiveWarning)
            path = Path(folder) / "tuned.json"
            saved = [replace(each, place="best" if each is worst else "slower") for each in of_size]
            replace(report, combinations=tuple(saved)).save(path)
            try:
                report.expect_best(path, within=0.03)
            except ExpectationMissed:
                counts["planted, found"] += 1
    return counts


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--trials", type=int, default=3)
    trials, is_wrong = arguments.parse_args().trials, False
    for kind in NOISES:
        total: Counter[str] = Counter()
        for (name, truth), trial in itertools.product(grids().items(), range(trials)):
            total.update(judge(truth, kind, 1000 * trial + len(name)))
        shown = ", ".join(f"{what} {count}" for what, count in total.items())
        print(f"{kind}: {shown}", flush=True)
        is_wrong |= any(total[what] for what in ("wrong", "expect_best false", "ties beyond the tolerance"))
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
