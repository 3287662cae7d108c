"""What a call through GraphRunner costs above copy-in plus replay, on the CPU twin.

All arms are timed in every round, in random order; the figures are medians over the rounds, of differences within a
round. The judged arm is the runner as a user gets it: lock, checks of the call and of the model, a copy of the outputs.
Exits 1 when it is above the limit. Padding and a model of a hundred modules are shown beside it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from pytest_cudagraph import GraphRunner
from pytest_cudagraph.backends import open_backend

LIMIT_US = 10.0
CALLS = 100
WIDTH = 64


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=200)
    rounds = arguments.parse_args().rounds
    torch.set_num_threads(1)
    print("above copy-in plus replay, per call:")
    overhead_us = _report("4 linear layers", _model(4), rounds)
    _report("50 linear layers", _model(50), max(20, rounds // 10))
    print(f"limit for 4 linear layers, exact batch size: {LIMIT_US:.0f} µs")
    return int(overhead_us > LIMIT_US)


def _model(layers: int) -> nn.Module:
    parts = [part for _ in range(layers) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*parts).eval()


def _report(name: str, model: nn.Module, rounds: int) -> float:
    full, short = torch.randn(4, WIDTH), torch.randn(3, WIDTH)
    with (
        open_backend("cpu").pool() as pool,
        GraphRunner(model, full, batch_sizes=(4,), device="cpu") as run,
        GraphRunner(model, full, batch_sizes=(4,), device="cpu", clone_outputs=False) as bare,
    ):
        graph = pool.capture(model, (full,), {}, batch_size=4)
        spent_us = _measure(
            {
                "replay": lambda: graph(full),
                "exact batch size": lambda: run(full),
                "exact, outputs not cloned": lambda: bare(full),
                "padded by one row": lambda: run(short),
            },
            rounds,
        )
    replay_us = statistics.median(spent_us["replay"])
    print(f"  {name} (copy-in plus replay: {replay_us:.1f} µs)")
    overhead_us = {}
    for arm, arm_us in spent_us.items():
        overhead_us[arm] = statistics.median(a - b for a, b in zip(arm_us, spent_us["replay"], strict=True))
        if arm != "replay":
            print(f"    {arm}: {overhead_us[arm]:+.1f} µs, {1 + overhead_us[arm] / replay_us:.2f}x")
    return overhead_us["exact batch size"]


def _measure(arms: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    order = random.Random(0)
    for arm in arms.values():
        _spent_us(arm)
    spent_us: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        names = list(arms)
        order.shuffle(names)
        for name in names:
            spent_us[name].append(_spent_us(arms[name]))
    return spent_us


def _spent_us(call: Callable[[], object]) -> float:
    begin_ns = time.perf_counter_ns()
    for _ in range(CALLS):
        call()
    return (time.perf_counter_ns() - begin_ns) / CALLS / 1e3


if __name__ == "__main__":
    sys.exit(main())
