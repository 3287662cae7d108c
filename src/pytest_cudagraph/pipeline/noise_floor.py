"""The noise floor of a machine: one callable measured against itself, in the way of eager and replay."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from pytest_cudagraph import measure, stats
from pytest_cudagraph.protocols import Backend, Clock
from pytest_cudagraph.stats import summaries
from pytest_cudagraph.units import to_ns, to_seconds
from pytest_cudagraph.values import Interval, Timing

TOLERANCE_RATIO = 0.005
"""The allowance for systematic timing errors. No measuring time detects less."""

_CALLS = (10, 100, 1000)
"""Matrix products per call: about 20 µs, 200 µs and 2 ms on a CPU; launches on a GPU."""

_SIZE = 32
"""Too small for torch to use threads, which would add noise of their own."""

_SECONDS = 0.6
"""Measuring time for each length of call."""

_FEWEST_BLOCKS = 10
"""Fewer blocks give no spread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseFloor:
    """The noise found with calls of one length."""

    call_ns: float
    noise_ratio: float
    """Robust spread of the log-ratios of blocks: 0.004 is 0.4 %."""
    apparent: Interval
    """How much faster than itself the callable seemed. 1 on a reliable machine."""
    detectable_ratio: float
    """The smallest regression found in 80 of 100 runs within the time budget that was asked about."""


def noise_floors(backend: Backend, clock: Clock, *, budget_s: float) -> list[NoiseFloor]:
    """Measure calls of several lengths against themselves, 0.6 s each, for gates with this time budget."""
    return [_floor(_timing(backend, clock, products), budget_s) for products in _CALLS]


def _timing(backend: Backend, clock: Clock, products: int) -> Timing:
    matrix = torch.eye(_SIZE, device=backend.device)

    def call() -> torch.Tensor:
        result = matrix
        for _ in range(products):
            result = result @ matrix
        return result

    with backend.running():
        return measure.measure_arms(
            measure.Arms(eager=call, replay=call),
            clock=clock,
            rule=stats.FixedTimeRule(time_ns=to_ns(_SECONDS)),
            bounds=measure.Bounds(first_ns=to_ns(2 * _SECONDS), extended_ns=to_ns(2 * _SECONDS)),
            seed=products,
            synchronize=backend.synchronize,
        )


def _floor(timing: Timing, budget_s: float) -> NoiseFloor:
    noise_ratio = timing.noise_ratio if timing.blocks >= _FEWEST_BLOCKS else math.inf
    # The number of blocks is proportional to time.
    blocks = math.floor(timing.blocks / to_seconds(timing.measure_ns) * budget_s)
    return NoiseFloor(
        call_ns=timing.replay.median_ns,
        noise_ratio=noise_ratio,
        apparent=timing.speedup,
        detectable_ratio=summaries.detectable_ratio(noise_ratio, blocks),
    )
