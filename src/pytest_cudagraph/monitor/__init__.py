"""What host and GPU did while some code ran: for the ``perf_monitor`` fixture and for serving code.

Readings are taken at the start, at the end, and whenever :meth:`PerfMonitor.sample` is called: no thread polls in
between, because polling wakes the driver and disturbs what is being measured. A peak is the highest reading, no more.
The GPU part was written against NVML's documentation and a fake: no GPU has run it yet.
"""

from __future__ import annotations

import time
from typing import Any

from pytest_cudagraph.monitor.card import GpuCard, GpuSample, HostSample, PerfCard
from pytest_cudagraph.monitor.gpus import watched_gpus
from pytest_cudagraph.monitor.host import HostReader
from pytest_cudagraph.protocols import Clock

__all__ = ["GpuCard", "GpuSample", "HostSample", "PerfCard", "PerfMonitor"]


class PerfMonitor:
    """A context manager; ``card`` tells afterwards what was seen.

    Example::

        with PerfMonitor() as watch:
            serve(requests)
        print("\\n".join(watch.card.lines()))

    Never fails for want of a GPU, of NVML or of a permission: what could not be read stands in the card's notes.
    """

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._now_ns = clock.now_ns if clock is not None else time.perf_counter_ns
        self._host = HostReader()
        self._hosts: list[HostSample] = []
        self._gpus: Any = None
        self._card: PerfCard | None = None
        self._started_ns = 0

    def __enter__(self) -> PerfMonitor:
        self._card, self._hosts = None, []
        self._gpus = watched_gpus()
        self.sample()
        self._started_ns = self._now_ns()
        return self

    def __exit__(self, *exc_info: object) -> None:
        duration_ns = self._now_ns() - self._started_ns
        self.sample()
        gpus, self._gpus = self._gpus, None
        gpus.close()
        self._card = PerfCard(
            duration_ns=duration_ns, host=tuple(self._hosts), gpus=gpus.cards(), notes=tuple(gpus.notes())
        )

    def sample(self) -> None:
        """Take one more reading; takes about a millisecond per GPU, so keep it out of what is timed."""
        if self._gpus is None:
            raise RuntimeError("a PerfMonitor samples only inside its with block")
        self._hosts.append(self._host.read())
        self._gpus.read()

    @property
    def card(self) -> PerfCard:
        """What was seen; :class:`RuntimeError` before the block has ended."""
        if self._card is None:
            raise RuntimeError("the card of a PerfMonitor is there once its with block has ended")
        return self._card
