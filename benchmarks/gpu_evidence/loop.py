"""The one loop every figure comes from: all arms of a cell, in a new random order each round."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pytest_cudagraph import stats
from pytest_cudagraph.measure import Bounds, PerfCounterClock
from pytest_cudagraph.measure.sampling import block_size
from pytest_cudagraph.measure.timer import WINDOW, Timer, warm_up
from pytest_cudagraph.stats import summaries
from pytest_cudagraph.units import to_ns
from pytest_cudagraph.values import Block

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """Samples in ns per arm, and the blocks of eager against replay."""

    samples_ns: Mapping[str, list[float]]
    blocks: list[Block]
    measure_ns: int


def interleave(
    calls: Mapping[str, Call],
    *,
    budget_s: float,
    synchronize: Call,
    seed: int,
    prepare: Call | None = None,
    pair: tuple[str, str] = ("eager", "replay"),
) -> Readings:
    """Sample every arm once a round until the budget is spent, at least one block; ``pair`` makes the blocks."""
    was_enabled = gc.isenabled()
    gc.collect()  # before the budget begins: with torch loaded it takes some tenths of a second
    gc.disable()  # a collection would fall on whichever arm runs
    timer = Timer(
        calls=calls,  # type: ignore[arg-type]  # the timer takes any names; its type lists those of the plugin
        clock=PerfCounterClock(),
        synchronize=synchronize,
        bounds=Bounds.of_budget(to_ns(budget_s)),
        prepare=prepare,
    )
    order = random.Random(seed)
    try:
        warm: Mapping[Any, list[float]] = warm_up(timer)
        level_ns = {name: min(samples[-WINDOW:]) for name, samples in warm.items()}
        rounds = block_size(sum(level_ns[name] for name in pair)) if pair[1] in calls else 4
        return _rounds(timer, rounds, order, pair)
    finally:
        if was_enabled:
            gc.enable()


def _rounds(timer: Timer, rounds: int, order: random.Random, pair: tuple[str, str]) -> Readings:
    names: list[Any] = list(timer.calls)
    samples_ns: dict[str, list[float]] = {name: [] for name in names}
    blocks: list[Block] = []
    took_ns = 0.0
    while not blocks or timer.elapsed_ns + took_ns < timer.bounds.extended_ns:
        begin_ns = timer.elapsed_ns
        found: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(rounds):
            for name in order.sample(names, len(names)):
                found[name].append(timer.sample_ns(name))
        for name, block_ns in found.items():
            samples_ns[name] += block_ns
        blocks.append(
            Block(
                eager_ns=summaries.quantile(found[pair[0]], 0.25),
                replay_ns=summaries.quantile(found[pair[1] if pair[1] in found else pair[0]], 0.25),
            )
        )
        took_ns = timer.elapsed_ns - begin_ns
    return Readings(samples_ns=samples_ns, blocks=blocks, measure_ns=timer.elapsed_ns)


def latency(samples_ns: list[float]) -> dict[str, Any]:
    """Quantiles of one arm, for the file."""
    found = summaries.latency_summary(samples_ns)
    names = ("samples", "minimum_ns", "q25_ns", "median_ns", "q75_ns", "q90_ns")
    return {name: round(getattr(found, name), 1) for name in names}


def speedup(blocks: list[Block]) -> dict[str, Any]:
    """The ratio of the pair with its 95 % interval, as the plugin itself computes it."""
    log_ratios = [math.log(block.eager_ns / block.replay_ns) for block in blocks]
    found = summaries.speedup_interval(log_ratios, stats.evidence)
    return {
        "estimate": round(found.estimate, 4),
        "low": round(found.low, 4) if math.isfinite(found.low) else None,
        "high": round(found.high, 4) if math.isfinite(found.high) else None,
        "noise_ratio": round(summaries.spread(log_ratios), 5),
        "blocks": len(blocks),
    }
