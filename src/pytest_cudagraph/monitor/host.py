"""Readings of the host and of this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

from pytest_cudagraph.monitor.card import HostSample

T = TypeVar("T")

_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
"""Linux only; virtual machines have none."""


class HostReader:
    """Reads load, clock and memory through psutil; what a platform lacks is None."""

    def __init__(self) -> None:
        self._process = psutil.Process()

    def read(self) -> HostSample:
        """One reading, some tens of microseconds."""
        load = _or_none(lambda: psutil.getloadavg()[0])
        clock = _or_none(lambda: psutil.cpu_freq())
        return HostSample(
            load_average=load,
            cpu_mhz=float(clock.current) if clock else None,
            rss_bytes=int(self._process.memory_info().rss),
            swap_used_bytes=_or_none(lambda: int(psutil.swap_memory().used)),
            governor=_or_none(lambda: _GOVERNOR.read_text(encoding="ascii").strip()),
        )


def _or_none(reading: Callable[[], T]) -> T | None:
    """psutil has no such function on some systems, and files under /sys or /proc may be closed to a container."""
    try:
        return reading()
    except (AttributeError, OSError, NotImplementedError, psutil.Error):
        return None
