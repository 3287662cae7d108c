"""What the baseline's gate says of replays whose sessions differ by a known amount: the table of docs/baselines.md.

python benchmarks/session_bound.py
"""

from __future__ import annotations

import math
import random
from collections import Counter

from pytest_cudagraph.baseline import Change, change
from pytest_cudagraph.values import DeviceInfo, Interval, Latency, SavedBatch, Session

TRIALS = 20_000
SPREADS = (0.0041, 0.0126, 0.0266)
"""Divided by a reference, quiet; as it is, quiet (docs/statistics.md); hosted runners as CodSpeed published them."""

DEVICE = DeviceInfo(
    kind="cpu", name="", driver=None, cuda=None, torch="", python="", host_cpu="", platform="", threads=1
)


def session(median_ns: float) -> Session:
    return Session(date="", commit="", software="", q25_ns=median_ns, median_ns=median_ns)


def held(saved_ns: list[float], now_ns: float) -> Change:
    latency = Latency(samples=1, minimum_ns=1.0, q25_ns=1.0, median_ns=1.0, q75_ns=1.0, q90_ns=1.0)
    saved = SavedBatch(
        name="",
        batch_size=1,
        eager=latency,
        replay=latency,
        compiled=None,
        speedup=Interval(estimate=1.0, low=1.0, high=1.0),
        kernels=None,
        kernel_names={},
        device=DEVICE,
        saved_at="",
        sessions=tuple(map(session, saved_ns)),
    )
    return change(saved, session(now_ns))


def rates(count: int, spread: float, slowdown: float, allowed: float) -> Counter[str]:
    """How often a replay slower by ``slowdown`` is called what, in percent, with ``count`` sessions saved."""
    rng = random.Random(7)
    found: Counter[str] = Counter()
    for _ in range(TRIALS):
        *before_ns, after_ns = (math.exp(rng.gauss(0.0, spread)) for _ in range(count + 1))
        found[held(before_ns, after_ns * (1.0 + slowdown)).comparison(allowed)] += 1
    return Counter({word: round(100 * number / TRIALS, 2) for word, number in found.items()})


def main() -> None:
    print("| allowed | spread | sessions | equal: fails | equal: inconclusive | +20 %: fails | +20 %: passes |")
    print("|---|---|---|---|---|---|---|")
    for allowed in (0.10, 0.05):
        for spread in SPREADS:
            for count in (1, 5, 10):
                equal, slow = (rates(count, spread, slowdown, allowed) for slowdown in (0.0, 0.20))
                figures = (equal["slower"], equal["uncertain"], slow["slower"], slow["same"])
                cells = " | ".join(f"{value:.1f} %" for value in figures)
                print(f"| {allowed:.0%} | {100 * spread:.2f} % | {count} | {cells} |")


if __name__ == "__main__":
    main()
