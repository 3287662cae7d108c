"""How often the gate is wrong, on traces of real machines and on noise by formula, with a simulated clock.

    python benchmarks/gate_error_rates.py                                       a sample, some minutes on two cores
    python benchmarks/gate_error_rates.py --trials 2000 --json rates.json       in full, hours; goes on where it stopped
    python benchmarks/gate_error_rates.py --only eager-bursts --trials 200

Drives the measuring loop and the gate as they are shipped. Prints per group of scenarios: verdicts, calls and simulated
time to the verdict, beside the rule of pytest-benchmark (its own statistics; eager rounds, then replay rounds; the
ratio of minima or medians against the threshold) with as much time as the gate took in the same trial. Exits 1 when a
limit is broken (benchmarks/README.md). With fewer than 2,000 trials per cell, broken means: the exact lower bound of
the share (Clopper-Pearson, 99 %) lies above the limit.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.error_rates import store  # noqa: E402
from benchmarks.error_rates.cells import Cell, Tally, all_cells, run_cells  # noqa: E402
from benchmarks.error_rates.limits import DECISION_LIMIT_NS, broken_limits  # noqa: E402
from benchmarks.error_rates.table import table  # noqa: E402

from pytest_cudagraph import EvidenceRule  # noqa: E402
from pytest_cudagraph.values import Block  # noqa: E402

TRIALS = 40
BUDGET_S = 10.0
"""The plugin's own default."""


def decision_ns(blocks: int = 200, repeats: int = 3000) -> float:
    """What a decision costs per block, on this machine's own clock: the fastest of several runs that stay open."""
    rng = random.Random(0)
    noisy = [Block(eager_ns=1e5 * rng.lognormvariate(0, 0.01), replay_ns=1e5) for _ in range(blocks)]
    fastest_ns = float("inf")
    for _ in range(repeats):
        rule = EvidenceRule(1.0, tolerance=0.0, min_time_ns=0.0)
        begin_ns = time.perf_counter_ns()
        for block in noisy:
            rule.add(block)
            rule.is_finished(1e9)
        fastest_ns = min(fastest_ns, (time.perf_counter_ns() - begin_ns) / blocks)
    return fastest_ns


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=TRIALS, help=f"per cell; {TRIALS} unless told; 0: judge the file")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="simulated seconds per measurement")
    parser.add_argument("--only", default="", help="scenarios whose name contains this")
    parser.add_argument("--json", type=Path, help="written after every pass; an earlier run's file is gone on with")
    asked = parser.parse_args(arguments)
    cells = all_cells(asked.only)
    if not cells:
        parser.error("--only names no scenario")
    facts = store.head(asked.seed, asked.budget)
    try:
        tallies = store.resumed(asked.json, cells, facts) if asked.json else {}
    except store.OtherRun as error:
        parser.error(str(error))
    begin = time.monotonic()

    def passed() -> None:
        trials = sum(tally.trials for tally in tallies.values())
        sys.stderr.write(f"\r{trials} trials, {time.monotonic() - begin:.0f} s")
        sys.stderr.flush()
        if asked.json:
            store.write(asked.json, cells, tallies, facts)

    budget_ns = asked.budget * 1e9
    run_cells(cells, tallies, trials=asked.trials, seed=asked.seed, budget_ns=budget_ns, jobs=asked.jobs, passed=passed)
    sys.stderr.write("\n")
    cells = [cell for cell in cells if cell.name in tallies and tallies[cell.name].trials]
    if not cells:
        parser.error("--trials must be at least 1 where there is no file")
    print(f"{_trials_text(tallies)} in each of {len(cells)} cells, seed {asked.seed}, budget {asked.budget:g} s")
    return _judged(cells, tallies)


def _trials_text(tallies: Mapping[str, Tally]) -> str:
    counts = sorted({tally.trials for tally in tallies.values()})
    return f"{counts[-1]} trials" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} trials"


def _judged(cells: Sequence[Cell], tallies: Mapping[str, Tally]) -> int:
    cost_ns = decision_ns()
    print(*table(cells, tallies), sep="\n")
    print(f"a decision costs {cost_ns / 1e3:.1f} µs per block")
    breaches = list(broken_limits(cells, tallies))
    if cost_ns > DECISION_LIMIT_NS:
        breaches.append(f"a decision costs {cost_ns / 1e3:.1f} µs per block; allowed {DECISION_LIMIT_NS / 1e3:.0f} µs")
    for breach in breaches:
        print("BROKEN", breach)
    print(f"{len(breaches)} limits broken" if breaches else "all limits kept")
    return int(bool(breaches))


if __name__ == "__main__":
    sys.exit(main())
