"""Readings of the host and of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import psutil

from pytest_cudagraph.monitor.card import HostSample

T = TypeVar("T")


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
        )


def _or_none(reading: Callable[[], T]) -> T | None:
    """psutil has no such function on some systems, and files under /sys or /proc may be closed to a container."""
    try:
        return reading()
    except (AttributeError, OSError, NotImplementedError, psutil.Error):
        return None
