"""One trial of the gate as it is shipped, and of the rule of pytest-benchmark with the same time."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter

import numpy as np
from benchmarks.error_rates.machine import Machine
from benchmarks.error_rates.scenarios import Scenario
from pytest_benchmark.stats import Stats

from pytest_cudagraph import Bounds, EvidenceRule, MeasuredBatch, Verdict, judge_speedup, measure_arms

THRESHOLD_RATIO = 1.15

_PEER_MIN_ROUNDS = 5
_PEER_MIN_TIME_NS = 5e3
"""pytest-benchmark's own defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one trial ended with."""

    verdict: Verdict
    calls: int
    """Timed ones, of both arms."""
    spent_ns: float
    """Simulated, to the verdict; without the first call of each arm where that is cold."""
    peer_min_passes: bool
    peer_median_passes: bool


def run_trial(scenario: Scenario, relative: float, number: int, *, seed: int, budget_ns: float) -> Found:
    """Measure and judge a speedup of ``relative`` times the threshold; the same numbers give the same trial."""
    chance = [seed, zlib.crc32(scenario.name.encode()), round(relative * 1000), number]
    true_ratio = THRESHOLD_RATIO * relative
    machine = scenario.machine(true_ratio, np.random.default_rng([0, *chance]))
    timing = measure_arms(
        machine.arms(),
        clock=machine.clock,
        rule=EvidenceRule(THRESHOLD_RATIO),
        bounds=Bounds.of_budget(budget_ns),
        seed=zlib.crc32(repr(chance).encode()),
        cpu_time_ns=machine.clock.cpu_time_ns,
    )
    peer = scenario.machine(true_ratio, np.random.default_rng([1, *chance]))
    eager, replay = (_peer_arm(peer, arm, timing.measure_ns / 2) for arm in (0, 1))
    return Found(
        verdict=judge_speedup(MeasuredBatch(timing=timing), THRESHOLD_RATIO).verdict,
        calls=(timing.eager.samples + timing.replay.samples) * timing.inner_calls,
        spent_ns=timing.measure_ns
        - _cold_ns(scenario, scenario.machine(true_ratio, np.random.default_rng([0, *chance]))),
        peer_min_passes=eager.min / replay.min >= THRESHOLD_RATIO,
        peer_median_passes=eager.median / replay.median >= THRESHOLD_RATIO,
    )


def _cold_ns(scenario: Scenario, same: Machine) -> float:
    """How long the cold first calls were: no gate can end before them."""
    own_tapes = scenario.kind is not None and scenario.kind.own_tapes
    return next(same.eager)[0] + next(same.replay)[1] if own_tapes else 0.0


def _peer_arm(machine: Machine, arm: int, time_ns: float) -> Stats:
    """One arm timed alone for ``time_ns``, as pytest-benchmark does: calibrate, then so many rounds that fit."""
    clock, tape = machine.clock, machine.eager if arm == 0 else machine.replay
    next_ns = map(itemgetter(arm), tape)

    def round_ns(calls: int) -> int:
        begin_ns = clock.now_ns()
        clock.time_ns += next(next_ns) if calls == 1 else sum(islice(next_ns, calls))
        return clock.now_ns() - begin_ns

    calls = 1
    least_ns = max(_PEER_MIN_TIME_NS, 10 * clock.resolution_ns)
    while (duration_ns := round_ns(calls)) < least_ns:
        calls *= 10
    stats = Stats()
    for _ in range(max(_PEER_MIN_ROUNDS, math.ceil(time_ns / duration_ns))):
        stats.update(round_ns(calls) / calls)
    return stats
