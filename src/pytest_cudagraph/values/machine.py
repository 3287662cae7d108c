"""What the numbers of a run were measured on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["cuda", "cpu"]
"""What ran the work: CUDA graphs on a GPU, or the CPU twin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """What the numbers of this run were measured on. Stable facts only: no clocks, no temperatures."""

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
    """The MIG profile (``1g.18gb``); None on a whole GPU and on a CPU."""
    power_limit_w: int | None = None
    """The limit the driver enforces; None on a CPU, and where NVML does not tell."""
    clocks: str | None = None
    """The clock policy in words (``application clock 1980 MHz``); None as ``power_limit_w``."""

    @property
    def software(self) -> str:
        """What runs the kernels, as far as it decides their speed: ``Python 3.12.3, torch 2.11.0, driver 580.159``."""
        driver = f", driver {self.driver}" if self.driver else ""
        return f"Python {self.python}, torch {self.torch}{driver}"

    def hardware_changes(self, now: DeviceInfo) -> tuple[str, ...]:
        """What forbids to compare a latency of ``now`` with one of this: ``power limit 700 W -> 600 W``; else nothing.

        What one side does not tell (older files, no NVML) is no difference.
        """
        if (self.kind, self.name) != (now.kind, now.name):
            return (f"{self.name} ({self.kind}) -> {now.name} ({now.kind})",)
        changes = [f"MIG {self.mig or 'off'} -> {now.mig or 'off'}"] if self.mig != now.mig else []
        if None not in (self.power_limit_w, now.power_limit_w) and self.power_limit_w != now.power_limit_w:
            changes.append(f"power limit {self.power_limit_w} W -> {now.power_limit_w} W")
        if None not in (self.clocks, now.clocks) and self.clocks != now.clocks:
            changes.append(f"{self.clocks} -> {now.clocks}")
        return tuple(changes)
