"""The same work in both arms, timed and judged by the product on this machine's own clock: how often does it fail?

    python benchmarks/aa_runs.py               300 runs, some three minutes
    python benchmarks/aa_runs.py --load        the same beside one busy process per core

The true speedup is 1. Targets take turns: 1.00 must not fail, 0.95 must not fail, 1.05 must not pass; and so do calls
of some 20 µs, 200 µs and 2 ms. Two runs of three can fail falsely; exits 1 if a single one does.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]

from pytest_cudagraph import (  # noqa: E402
    Arms,
    Bounds,
    EvidenceRule,
    MeasuredBatch,
    PerfCounterClock,
    Verdict,
    judge_speedup,
    measure_arms,
)

TARGETS = (1.00, 0.95, 1.05)
CALL_NS = (20e3, 200e3, 2e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measurement of a true speedup of 1."""

    target: float
    call_ns: float
    verdict: Verdict
    estimate: float
    seconds: float

    @property
    def is_false_failure(self) -> bool:
        return self.verdict is Verdict.FAILED and self.target <= 1.0

    @property
    def is_false_pass(self) -> bool:
        return self.verdict is Verdict.PASSED and self.target > 1.0


def work_of(call_ns: float) -> Callable[[], object]:
    """A call of about this length when nothing disturbs it."""
    items = 1000

    def work() -> int:
        return sum(range(items))

    fastest_ns = min(_time_ns(work) for _ in range(200))
    items = max(1, round(items * call_ns / fastest_ns))
    return work


def _time_ns(call: Callable[[], object]) -> int:
    begin_ns = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - begin_ns


def one_run(work: Callable[[], object], target: float, call_ns: float, *, budget_s: float, seed: int) -> Run:
    """Measure and judge, as the plugin does."""
    timing = measure_arms(
        Arms(eager=work, replay=work),
        clock=PerfCounterClock(),
        rule=EvidenceRule(target, min_time_ns=min(0.25e9, budget_s * 1e9 / 4)),
        bounds=Bounds.of_budget(budget_s * 1e9),
        seed=seed,
    )
    verdict = judge_speedup(MeasuredBatch(timing=timing), target).verdict
    seconds, estimate = timing.measure_ns / 1e9, timing.speedup.estimate
    return Run(target=target, call_ns=call_ns, verdict=verdict, estimate=estimate, seconds=seconds)


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes that never rest."""
    context = multiprocessing.get_context("spawn")
    started = [context.Process(target=_spin, daemon=True) for _ in range(processes)]
    try:
        for process in started:
            process.start()
        yield
    finally:
        for process in started:
            process.terminate()
            process.join()


def _spin() -> None:
    while os.getppid() != 1:
        sum(range(100_000))


def summary(runs: Sequence[Run]) -> Iterator[str]:
    """A line per target, and the count that decides."""
    for target in TARGETS:
        some = [run for run in runs if run.target == target]
        if not some:
            continue
        counts = Counter(run.verdict for run in some)
        spent = statistics.median(run.seconds for run in some)
        far = max((run.estimate for run in some), key=lambda estimate: abs(estimate - 1.0))
        yield (
            f"target {target:.2f}: {counts[Verdict.PASSED]} passed, {counts[Verdict.FAILED]} failed, "
            f"{counts[Verdict.INCONCLUSIVE]} inconclusive of {len(some)}; median {spent:.2f} s; "
            f"farthest estimate {far:.3f}"
        )
    judged = [run for run in runs if run.target <= 1.0]
    failures, passes = sum(run.is_false_failure for run in runs), sum(run.is_false_pass for run in runs)
    bound = "" if failures or not judged else f" (95 %: below {1 - 0.05 ** (1 / len(judged)):.1%})"
    yield f"false failures: {failures} of {len(judged)}{bound}; false passes: {passes} of {len(runs) - len(judged)}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--budget", type=float, default=1.0, help="seconds per run, at most")
    parser.add_argument("--load", action="store_true", help="with a busy process per core")
    asked = parser.parse_args(arguments)
    if asked.runs < 1 or asked.budget <= 0:
        parser.error("--runs and --budget must be above zero")
    works = [(work_of(call_ns), call_ns) for call_ns in CALL_NS]
    kinds = itertools.cycle(itertools.product(TARGETS, works))
    with busy(os.cpu_count() or 1 if asked.load else 0):
        runs = [
            one_run(work, target, call_ns, budget_s=asked.budget, seed=seed)
            for seed, (target, (work, call_ns)) in zip(range(asked.runs), kinds, strict=False)
        ]
    print(f"{asked.runs} runs of the same work in both arms, {'every core loaded' if asked.load else 'as it is'}")
    print(*summary(runs), sep="\n")
    return int(any(run.is_false_failure for run in runs))


if __name__ == "__main__":
    sys.exit(main())
