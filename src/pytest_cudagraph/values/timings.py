"""What one measurement found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Decision = Literal["pass", "fail", "open"]
"""The decision of a measurement about its target. ``open``: no decision within the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """The distribution of one arm's samples. A sample is one synchronised call, host time included."""

    samples: int
    minimum_ns: float
    q25_ns: float
    median_ns: float
    q75_ns: float
    q90_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One randomised block: the lower-quartile sample of each arm (see docs/statistics.md)."""

    eager_ns: float
    replay_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A ratio with the 95 % interval obtained by inverting the sequential test that decided it."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UndecidedState:
    """The evidence of an undecided measurement."""

    quiet: int
    """Blocks in which not only one arm was disturbed. A verdict rests on them."""
    least_blocks: int
    """The number of such blocks that a verdict needs."""
    elapsed_ns: float
    """The time from the first sample to the last look."""
    least_ns: float
    """The time that a verdict on this side of the target needs. Few blocks or a large failure need more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One measurement of eager against replay at one batch size."""

    eager: Latency
    replay: Latency
    speedup: Interval
    decision: Decision
    target_ratio: float | None
    """The speedup that the evidence was collected against. None if speed is not judged."""
    blocks: int
    noise_ratio: float
    """Robust spread of the block log-ratios (1.4826 MAD): 0.004 means 0.4 %."""
    detectable_ratio: float
    """The smallest relative difference found in 80 of 100 runs with as much measuring (MDE)."""
    measure_ns: int
    seed: int
    compiled: Latency | None = None
    device_replay: Latency | None = None
    """A diagnostic reading of the replay by device events. None on the twin. Never judged."""
    extended: bool = False
    drift_ratio: float = 1.0
    """Level of the eager arm in the last quarter of the run over the first quarter."""
    inner_calls: int = 1
    discarded: int = 0
    """Blocks discarded because the device was throttled or shared. They are not in ``blocks``."""
    disturbance: str = ""
    """Why blocks were discarded."""
    notes: tuple[str, ...] = ()
    reference: Latency | None = None
    """The reference workload between the blocks of this measurement. None if there was none."""
    weighed: UndecidedState | None = None
    """The evidence state, if a judged measurement is still open."""
    busy_ns: float | None = None
    """The time of the kernels of one replay alone. None without a reading."""
