"""What was measured, and on what machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = str
"""``cuda``: CUDA graphs on a GPU. ``cpu``: the CPU twin. Another name: the backend of another plugin."""


def is_emulated(name: str) -> bool:
    """Whether a CUDA device of this name is emulated in host memory. It is no GPU, and has no speed."""
    return name.startswith("Emulated CUDA device")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """The device that a run measured on. Stable facts only: no momentary clocks, no temperatures."""

    kind: Kind
    name: str
    driver: str | None
    cuda: str | None
    torch: str
    python: str
    host_cpu: str
    platform: str
    threads: int
    mig: str | None = None
    """The MIG profile (``1g.18gb``). None on a whole GPU and on a CPU."""
    power_limit_w: int | None = None
    """The limit that the driver enforces. None on a CPU, and if NVML does not report it."""
    clocks: str | None = None
    """The clock policy (``application clock 1980 MHz``). None as ``power_limit_w``."""

    @property
    def software(self) -> str:
        """The software that decides the kernels' speed: ``Python 3.12.3, torch 2.11.0, driver 580.159``."""
        driver = f", driver {self.driver}" if self.driver else ""
        return f"Python {self.python}, torch {self.torch}{driver}"

    def hardware_changes(self, now: DeviceInfo) -> tuple[str, ...]:
        """Changes after which latencies are not comparable: ``power limit 700 W -> 600 W``.

        A fact that one side lacks (older files, no NVML) is no change.
        """
        if (self.kind, self.name) != (now.kind, now.name):
            return (f"{self.name} ({self.kind}) -> {now.name} ({now.kind})",)
        changes = [f"MIG {self.mig or 'off'} -> {now.mig or 'off'}"] if self.mig != now.mig else []
        if None not in (self.power_limit_w, now.power_limit_w) and self.power_limit_w != now.power_limit_w:
            changes.append(f"power limit {self.power_limit_w} W -> {now.power_limit_w} W")
        if None not in (self.clocks, now.clocks) and self.clocks != now.clocks:
            changes.append(f"{self.clocks} -> {now.clocks}")
        return tuple(changes)


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
class Medians:
    """The latencies that stand beside a speedup: medians of the samples in the blocks that were judged.

    A median of ratios is not the ratio of medians. So both arms are moved by one factor, usually below 1 %, after which
    eager over replay is the speedup's estimate.
    """

    eager_ns: float
    replay_ns: float
    compiled_ns: float | None = None


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
    medians: Medians
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

    @property
    def attainable_ratio(self) -> float | None:
        """The speedup if launches took no time: eager over the time of the kernels alone. None without a reading."""
        if not self.busy_ns:
            return None
        # A reading has a cost of its own. What was measured is attainable.
        return max(self.medians.eager_ns / self.busy_ns, self.speedup.estimate)
