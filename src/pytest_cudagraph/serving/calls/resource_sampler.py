"""Reads memory, load, clocks and power in one thread, for days, and keeps their spread only."""

from __future__ import annotations

import os
import platform
import threading
from dataclasses import dataclass, replace
from typing import Any

from pytest_cudagraph.errors import InputError
from pytest_cudagraph.monitor.perf_monitor import Poller, check_seconds
from pytest_cudagraph.monitor.readings import HostReader, WatchedGpus, watched_gpus

HOST_READINGS = ("rss_bytes", "cpu_ratio", "load_average", "cpu_mhz", "swap_used_bytes")
GPU_READINGS = ("memory_used_bytes", "utilization_ratio", "power_w", "sm_clock_mhz", "temperature_c")


def process_name() -> str:
    """``HOST-PID``, as in the names of exported files."""
    return f"{platform.node() or 'host'}-{os.getpid()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceSpread:
    """One kind of reading in one process. ``gpu`` is torch's index, None for a reading of host or process."""

    process: str
    reading: str
    gpu: int | None
    samples: int
    mean: float
    minimum: float
    maximum: float
    last: float

    def with_one_more(self, value: float) -> ResourceSpread:
        return replace(
            self,
            samples=self.samples + 1,
            mean=self.mean + (value - self.mean) / (self.samples + 1),
            minimum=min(self.minimum, value),
            maximum=max(self.maximum, value),
            last=value,
        )


class ResourceSampler:
    """A context manager. Its thread reads every ``every_s`` seconds and once more at the end. Readings are never taken
    in a timed call.

    ``before`` is an earlier one, whose readings this one goes on with. Raises
    :class:`~pytest_cudagraph.errors.InputError` for an invalid ``every_s``. A missing GPU, NVML or permission is
    no error: ``notes`` names the values that could not be read.
    """

    def __init__(self, every_s: float = 1.0, before: ResourceSampler | None = None) -> None:
        __tracebackhide__ = True
        check_seconds(every_s)
        self._every_s = every_s
        # Reentrant: a signal handler may read while this thread does.
        self._lock: threading.RLock = before._lock if before else threading.RLock()
        self._spreads: dict[tuple[str, int | None], ResourceSpread] = before._spreads if before else {}
        self._open: tuple[HostReader, WatchedGpus, Poller] | None = None
        self.notes: tuple[str, ...] = ()

    def __enter__(self) -> ResourceSampler:
        __tracebackhide__ = True
        if self._open is not None:
            raise InputError("one block at a time can use a sampler; found a block inside its own: make two")
        host, gpus = HostReader(), watched_gpus()
        self._open = host, gpus, Poller(lambda: self._sample(host, gpus), self._every_s)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._open is not None:
            (host, gpus, poller), self._open = self._open, None
            poller.stop()
            self._sample(host, gpus)
            gpus.close()
            self.notes = tuple(gpus.notes())

    def spreads(self) -> list[ResourceSpread]:
        """The readings until now."""
        with self._lock:
            return list(self._spreads.values())

    def clear(self) -> None:
        """Forget the readings until now."""
        with self._lock:
            self._spreads.clear()

    def _sample(self, host: HostReader, gpus: WatchedGpus) -> None:
        read = host.read()
        readings: list[tuple[tuple[str, int | None], Any]] = [
            ((name, None), getattr(read, name)) for name in HOST_READINGS
        ]
        for index, sample in gpus.take():
            readings += [((name, index), getattr(sample, name)) for name in GPU_READINGS]
        process = process_name()
        with self._lock:
            for (name, gpu), value in readings:
                if value is not None:
                    self._add(process, name, gpu, float(value))

    def _add(self, process: str, name: str, gpu: int | None, value: float) -> None:
        spread = self._spreads.get((name, gpu))
        self._spreads[name, gpu] = spread.with_one_more(value) if spread else ResourceSpread(
            process=process, reading=name, gpu=gpu, samples=1, mean=value, minimum=value, maximum=value, last=value
        )  # fmt: skip
