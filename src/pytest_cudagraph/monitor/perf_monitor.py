"""Reads load, clocks and memory of the host and the GPUs while some code runs.

It reads at the start, at the end, at each call of :meth:`PerfMonitor.sample`, and optionally in a thread. By default no
thread polls: polling wakes the driver and disturbs a measurement. A measurement calls ``sample`` between its timed
blocks. No GPU has run the GPU part yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pytest_cudagraph.errors import InputError
from pytest_cudagraph.foreign import value_text
from pytest_cudagraph.monitor.card import HostSample, PerfCard
from pytest_cudagraph.monitor.readings import HostReader, watched_gpus
from pytest_cudagraph.protocols import Clock


class PerfMonitor:
    """A context manager. Read ``card`` after the block.

    Example::

        with PerfMonitor() as watch:
            serve(requests)
        print("\\n".join(watch.card.lines()))

    With ``every_s`` a thread takes a reading every so many seconds, for code that cannot call :meth:`sample`.
    ``waiting_processes`` processes hold a GPU and wait for this process, so they do not count as other processes.
    Raises :class:`~pytest_cudagraph.errors.InputError` for an invalid ``every_s``. A missing GPU, NVML or permission
    is no error: the card's notes name the values that could not be read.
    """

    def __init__(self, *, clock: Clock | None = None, every_s: float | None = None, waiting_processes: int = 0) -> None:
        __tracebackhide__ = True
        if every_s is not None:
            check_seconds(every_s)
        self._every_s = every_s
        self._waiting = waiting_processes
        self._lock = threading.Lock()
        self._poller: Poller | None = None
        self._now_ns = clock.now_ns if clock is not None else time.perf_counter_ns
        self._host = HostReader()
        self._hosts: list[HostSample] = []
        self._gpus: Any = None
        self._card: PerfCard | None = None
        self._started_ns = 0

    def __enter__(self) -> PerfMonitor:
        __tracebackhide__ = True
        if self._gpus is not None:
            raise InputError("one block at a time can use a PerfMonitor; found a block inside its own: make two")
        self._card, self._hosts = None, []
        self._gpus = watched_gpus(self._waiting)
        self.sample()
        if self._every_s is not None:
            self._poller = Poller(self.sample, self._every_s)
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
        """Take one more reading. It takes about a millisecond for each GPU: do not call it in timed code."""
        __tracebackhide__ = True
        if self._gpus is None:
            raise RuntimeError("PerfMonitor.sample() works only inside the with block")
        with self._lock:
            self._hosts.append(self._host.read())
            self._gpus.read()

    def check(self) -> str:
        """Take one more reading. Return what has disturbed the GPUs since the last one, empty if nothing has."""
        self.sample()
        with self._lock:
            gpus = tuple(replace(gpu, samples=gpu.samples[-2:]) for gpu in self._gpus.cards())
            return PerfCard(duration_ns=0, host=tuple(self._hosts), gpus=gpus).disturbance

    @property
    def card(self) -> PerfCard:
        """The readings. Raises :class:`RuntimeError` before the block has ended."""
        __tracebackhide__ = True
        if self._card is None:
            raise RuntimeError("PerfMonitor.card is available after the with block")
        return self._card


def check_seconds(every_s: Any) -> None:
    """Raise :class:`~pytest_cudagraph.errors.InputError` for what is no number of seconds above 0."""
    __tracebackhide__ = True
    is_number = isinstance(every_s, (int, float)) and not isinstance(every_s, bool)
    if not is_number or not 0 < every_s < threading.TIMEOUT_MAX:
        raise InputError(f"every_s must be a number of seconds above 0, or None; found {value_text(every_s)}")


class Poller:
    """Calls ``sample`` periodically in a thread."""

    def __init__(self, sample: Callable[[], None], every_s: float) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(sample, every_s), name="perf-monitor", daemon=True)
        self._thread.start()

    def _run(self, sample: Callable[[], None], every_s: float) -> None:
        while not self._stopped.wait(every_s):
            sample()

    def stop(self) -> None:
        """Stop the thread, and wait until it has ended."""
        self._stopped.set()
        self._thread.join()
