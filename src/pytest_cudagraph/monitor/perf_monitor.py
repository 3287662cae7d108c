"""What host and GPU did while some code ran: for the ``perf_monitor`` fixture and for serving code.

Readings are taken at the start, at the end, whenever :meth:`PerfMonitor.sample` is called, and, if asked for, by a
thread in between. By default no thread polls, because polling wakes the driver and disturbs what is being measured; a
measurement calls ``sample`` itself, between its timed blocks. A peak is the highest reading, no more.
The GPU part was written against NVML's documentation and a fake: no GPU has run it yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pytest_cudagraph.errors import InputError
from pytest_cudagraph.monitor.card import HostSample, PerfCard
from pytest_cudagraph.monitor.readings import HostReader, watched_gpus
from pytest_cudagraph.protocols import Clock


class PerfMonitor:
    """A context manager; ``card`` tells afterwards what was seen.

    Example::

        with PerfMonitor() as watch:
            serve(requests)
        print("\\n".join(watch.card.lines()))

    ``every_s`` takes a reading in a thread each so many seconds, for code that has no gaps to call :meth:`sample` in.
    ``waiting_processes`` hold a GPU and wait for this one, as whoever started it may: they do not count as others.
    Raises :class:`~pytest_cudagraph.errors.InputError` for an ``every_s`` that is no time.
    Never fails for want of a GPU, of NVML or of a permission: what could not be read stands in the card's notes.
    """

    def __init__(self, *, clock: Clock | None = None, every_s: float | None = None, waiting_processes: int = 0) -> None:
        if every_s is not None:
            _check_seconds(every_s)
        self._every_s = every_s
        self._waiting = waiting_processes
        self._lock = threading.Lock()
        self._poller: _Poller | None = None
        self._now_ns = clock.now_ns if clock is not None else time.perf_counter_ns
        self._host = HostReader()
        self._hosts: list[HostSample] = []
        self._gpus: Any = None
        self._card: PerfCard | None = None
        self._started_ns = 0

    def __enter__(self) -> PerfMonitor:
        self._card, self._hosts = None, []
        self._gpus = watched_gpus(self._waiting)
        self.sample()
        if self._every_s is not None:
            self._poller = _Poller(self.sample, self._every_s)
        self._started_ns = self._now_ns()
        return self

    def __exit__(self, *exc_info: object) -> None:
        duration_ns = self._now_ns() - self._started_ns
        if self._poller is not None:
            self._poller.stop()
            self._poller = None
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
        with self._lock:
            self._hosts.append(self._host.read())
            self._gpus.read()

    def check(self) -> str:
        """Take one more reading; what has disturbed the GPUs since the last one, empty if nothing did."""
        self.sample()
        with self._lock:
            gpus = tuple(replace(gpu, samples=gpu.samples[-2:]) for gpu in self._gpus.cards())
            return PerfCard(duration_ns=0, host=tuple(self._hosts), gpus=gpus).disturbance

    @property
    def card(self) -> PerfCard:
        """What was seen; :class:`RuntimeError` before the block has ended."""
        if self._card is None:
            raise RuntimeError("the card of a PerfMonitor is there once its with block has ended")
        return self._card


def _check_seconds(every_s: Any) -> None:
    is_number = isinstance(every_s, (int, float)) and not isinstance(every_s, bool)
    if not is_number or not 0 < every_s < threading.TIMEOUT_MAX:
        raise InputError(f"every_s takes seconds between readings, a number above 0, or None; found {every_s!r}")


class _Poller:
    """Calls ``sample`` every so many seconds until it is stopped."""

    def __init__(self, sample: Callable[[], None], every_s: float) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(sample, every_s), name="perf-monitor", daemon=True)
        self._thread.start()

    def _run(self, sample: Callable[[], None], every_s: float) -> None:
        while not self._stopped.wait(every_s):
            sample()

    def stop(self) -> None:
        """Returns once no reading is under way."""
        self._stopped.set()
        self._thread.join()
