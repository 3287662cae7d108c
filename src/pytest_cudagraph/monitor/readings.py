"""Readings of the host, of this process, and of the GPUs that torch sees. No GPU has run this code yet."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from pytest_cudagraph.device import nvml_handle
from pytest_cudagraph.environment import start_nvml
from pytest_cudagraph.monitor.card import GpuCard, GpuSample, HostSample

T = TypeVar("T")

_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
"""Linux only. Virtual machines have none."""


class HostReader:
    """Reads load, clock and memory with psutil. A value is None where the platform lacks it."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()  # the first call starts the interval

    def read(self) -> HostSample:
        """One reading, some tens of microseconds."""
        load = _or_none(lambda: psutil.getloadavg()[0])
        clock = _or_none(lambda: psutil.cpu_freq())
        return HostSample(
            load_average=load,
            cpu_mhz=float(clock.current) if clock else None,
            rss_bytes=int(self._process.memory_info().rss),
            cpu_ratio=self._process.cpu_percent() / 100,
            swap_used_bytes=_or_none(lambda: int(psutil.swap_memory().used)),
            governor=_or_none(lambda: _GOVERNOR.read_text(encoding="ascii").strip()),
        )


def _or_none(reading: Callable[[], T]) -> T | None:
    """None where psutil lacks the function, or where a container may not read /sys or /proc."""
    try:
        return reading()
    except (AttributeError, OSError, NotImplementedError, psutil.Error):
        return None


_SLOWDOWNS = (
    ("SwPowerCap", "power cap"),
    ("HwSlowdown", "hardware slowdown"),
    ("SwThermalSlowdown", "heat (software)"),
    ("HwThermalSlowdown", "heat (hardware)"),
    ("HwPowerBrakeSlowdown", "power brake"),
    ("SyncBoost", "boost synchronised with other GPUs"),
)
"""NVML's reasons that reduce speed. Idling and clocks set by a user are reasons too, but no slowdowns."""


_LIMITS = (
    ("POWER", "power limit"),
    ("THERMAL", "heat limit"),
    ("BOARD_LIMIT", "board limit"),
    ("RELIABILITY", "reliability limit"),
    ("SYNC_BOOST", "boost synchronised with other GPUs"),
)
"""NVML's counters of the time (ns) in which a limit reduced the clocks, also between two samples."""


class WatchedGpus:
    """GPUs by torch's index, each with its NVML handle, found by UUID. NVML has other indices."""

    def __init__(self, nvml: Any, notes: list[str], waiting: int = 0) -> None:
        self._nvml = nvml
        self._waiting = waiting
        self._notes = notes
        self._gpus: list[_Gpu] = []

    def add(self, index: int) -> None:
        """Watch one GPU. Add a note if NVML does not know it."""
        try:
            properties = torch.cuda.get_device_properties(index)
            handle = nvml_handle(self._nvml, properties)
        except (RuntimeError, AttributeError, self._nvml.NVMLError) as error:
            self._notes.append(f"GPU {index}: no readings ({error})")
            return
        self._gpus.append(_Gpu(self._nvml, handle, index, properties.name, self._waiting))

    def read(self) -> None:
        """Take one more sample of every GPU."""
        for gpu in self._gpus:
            gpu.read()

    def take(self) -> list[tuple[int, GpuSample]]:
        """Take one sample of every GPU, by its index, and keep none: for readings without end."""
        self.read()
        return [(gpu.index, gpu.samples.pop()) for gpu in self._gpus]

    def cards(self) -> tuple[GpuCard, ...]:
        return tuple(gpu.card() for gpu in self._gpus)

    def notes(self) -> list[str]:
        """The values that could not be read: one note for each GPU and reason."""
        return self._notes + [note for gpu in self._gpus for note in gpu.notes()]

    def close(self) -> None:
        """Shut NVML down. The readings stay."""
        if self._nvml is not None:
            try:
                self._nvml.nvmlShutdown()
            except self._nvml.NVMLError as error:
                self._notes.append(f"NVML did not shut down ({error})")


class _Gpu:
    def __init__(self, nvml: Any, handle: Any, index: int, name: str, waiting: int) -> None:
        self._nvml, self._handle = nvml, handle
        self.index, self._name = index, name
        self._waiting = waiting
        self.samples: list[GpuSample] = []
        self._refused: dict[str, list[str]] = {}
        self._max_clock = self._ask("top clock", "nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM)
        self._limit_mw = self._setting("nvmlDeviceGetEnforcedPowerLimit")
        self._default_limit_mw = self._setting("nvmlDeviceGetPowerManagementDefaultLimit")
        self._persistence = self._setting("nvmlDeviceGetPersistenceMode")
        mig = self._setting("nvmlDeviceGetMigMode")
        self._mig = None if mig is None else mig[0]
        kinds = [getattr(nvml, name, None) for name in ("NVML_MEMORY_ERROR_TYPE_UNCORRECTED", "NVML_VOLATILE_ECC")]
        self._ecc_errors = None if None in kinds else self._setting("nvmlDeviceGetTotalEccErrors", *kinds)

    def read(self) -> None:
        nvml = self._nvml
        power_mw = self._ask("power", "nvmlDeviceGetPowerUsage")
        memory = self._ask("memory", "nvmlDeviceGetMemoryInfo")
        processes = self._ask("processes", "nvmlDeviceGetComputeRunningProcesses")
        # A part of a GPU (MIG) has no utilization.
        utilization = self._setting("nvmlDeviceGetUtilizationRates")
        self.samples.append(
            GpuSample(
                sm_clock_mhz=self._ask("clock", "nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
                temperature_c=self._ask("temperature", "nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
                power_w=_watts(power_mw),
                memory_used_bytes=None if memory is None else int(memory.used),
                slowdowns=self._slowdowns(),
                other_processes=None if processes is None else max(_others(processes) - self._waiting, 0),
                held_ns=self._held_ns(),
                utilization_ratio=None if utilization is None else utilization.gpu / 100,
            )
        )

    def card(self) -> GpuCard:
        return GpuCard(
            index=self.index,
            name=self._name,
            max_sm_clock_mhz=self._max_clock,
            samples=tuple(self.samples),
            power_limit_w=_watts(self._limit_mw),
            default_power_limit_w=_watts(self._default_limit_mw),
            is_persistent=None if self._persistence is None else bool(self._persistence),
            is_partitioned=None if self._mig is None else bool(self._mig),
            ecc_errors=self._ecc_errors,
        )

    def notes(self) -> list[str]:
        return [f"GPU {self.index}: no {', '.join(whats)} ({why})" for why, whats in self._refused.items()]

    def _slowdowns(self) -> tuple[str, ...]:
        bits, _ = self._try("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:
            # Drivers before 535 know the call by this name only.
            bits = self._ask("slowdowns", "nvmlDeviceGetCurrentClocksThrottleReasons")
        return tuple(words for name, words in _SLOWDOWNS if bits and bits & _reason_bit(self._nvml, name))

    def _held_ns(self) -> dict[str, int]:
        """The counters that this GPU has. A missing counter needs no note."""
        held_ns = {}
        for name, words in _LIMITS:
            policy = getattr(self._nvml, f"NVML_PERF_POLICY_{name}", None)
            counter = None if policy is None else self._setting("nvmlDeviceGetViolationStatus", policy)
            if counter is not None:
                held_ns[words] = int(counter.violationTime)
        return held_ns

    def _setting(self, call: str, *arguments: Any) -> Any:
        """The result of a call, or None without a note: many GPUs lack a setting."""
        return self._try(call, *arguments)[0]

    def _ask(self, what: str, call: str, *arguments: Any) -> Any:
        value, why_not = self._try(call, *arguments)
        if why_not and what not in self._refused.setdefault(why_not, []):
            self._refused[why_not].append(what)
        return value

    def _try(self, call: str, *arguments: Any) -> tuple[Any, str]:
        """The result of a call and an empty text, or None and the error."""
        try:
            return getattr(self._nvml, call)(self._handle, *arguments), ""
        except self._nvml.NVMLError as error:
            return None, str(error)
        except AttributeError:
            return None, "pynvml is too old"


def watched_gpus(waiting: int = 0) -> WatchedGpus:
    """Every GPU that torch sees, or none, with a note, if there is no GPU or no NVML.

    On each GPU, ``waiting`` processes do not count as other processes.
    """
    with warnings.catch_warnings():
        # Torch warns here about an unsuitable driver, which is not the monitor's concern.
        warnings.simplefilter("ignore")
        is_available = torch.cuda.is_available()
    if not is_available:
        return WatchedGpus(None, ["no GPU readings: torch sees no GPU"])
    nvml = start_nvml()
    if isinstance(nvml, str):
        return WatchedGpus(None, [f"no GPU readings: {nvml}"])
    watched = WatchedGpus(nvml, [], waiting)
    for index in range(torch.cuda.device_count()):
        watched.add(index)
    return watched


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _reason_bit(nvml: Any, name: str) -> int:
    older = getattr(nvml, f"nvmlClocksThrottleReason{name}", 0)
    return int(getattr(nvml, f"nvmlClocksEventReason{name}", older))


def _others(processes: list[Any]) -> int:
    """The number of other processes. If a container hides our own number, one unknown process counts as ours."""
    knows_us = any(process.pid == os.getpid() for process in processes)
    has_context = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    is_ours_hidden = not knows_us and has_context and bool(processes)
    return len(processes) - int(knows_us or is_ours_hidden)
