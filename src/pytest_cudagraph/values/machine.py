"""The machine that a run measured on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["cuda", "cpu"]
"""CUDA graphs on a GPU, or the CPU twin."""


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
