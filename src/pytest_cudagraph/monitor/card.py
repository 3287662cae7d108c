"""The readings of a monitor, and their text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pytest_cudagraph.units import bytes_text, plural, seconds_text


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSample:
    """One reading of the host. A field is None where the system has no value."""

    load_average: float | None
    """Runnable processes, mean over the last minute."""
    cpu_mhz: float | None
    """Mean clock of the CPU's cores."""
    rss_bytes: int
    """Resident memory of this process."""
    cpu_ratio: float | None = None
    """CPU time of this process since the reading before, divided by the time: 2.0 where it kept two cores busy."""
    swap_used_bytes: int | None = None
    """Of the whole system."""
    governor: str | None = None
    """Linux's frequency governor of the first core, such as ``performance`` or ``powersave``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """One reading of a GPU. A field is None where NVML has no value."""

    sm_clock_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    memory_used_bytes: int | None
    slowdowns: tuple[str, ...]
    """Why the clocks were reduced at this moment, empty if they were not."""
    other_processes: int | None
    """Other processes that hold a context on the GPU. A container may hide some."""
    held_ns: Mapping[str, int] = field(default_factory=dict)
    """By the name of a limit: how long it has reduced the clocks since the driver was loaded."""
    utilization_ratio: float | None = None
    """The part of NVML's last interval, up to a second, in which the GPU ran a kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCard:
    """One GPU during the block."""

    index: int
    """Torch's index, which may differ from that of nvidia-smi."""
    name: str
    max_sm_clock_mhz: int | None
    samples: tuple[GpuSample, ...]
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    is_persistent: bool | None = None
    """Whether the driver stays loaded between processes."""
    is_partitioned: bool | None = None
    """Whether multi-instance mode (MIG) is on."""
    ecc_errors: int | None = None
    """Uncorrected memory errors since the driver was loaded."""

    @property
    def held_ns(self) -> dict[str, int]:
        """How long each limit reduced the clocks during the block, also between two samples."""
        if not self.samples:
            return {}
        first, last = self.samples[0].held_ns, self.samples[-1].held_ns
        grown = {limit: last[limit] - first[limit] for limit in last if limit in first}
        return {limit: held_ns for limit, held_ns in grown.items() if held_ns > 0}

    @property
    def slowdowns(self) -> tuple[str, ...]:
        """The reasons of all samples, each once."""
        return tuple(dict.fromkeys(reason for sample in self.samples for reason in sample.slowdowns))

    @property
    def is_shared(self) -> bool:
        """Whether another process used this GPU in any sample."""
        return any(sample.other_processes for sample in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class PerfCard:
    """Host and GPUs during the block. The first sample is from its start, the last from its end."""

    duration_ns: int
    host: tuple[HostSample, ...]
    gpus: tuple[GpuCard, ...] = ()
    notes: tuple[str, ...] = ()
    """The values that could not be read, and why."""

    @property
    def peak_rss_bytes(self) -> int:
        """The highest memory reading of this process."""
        return max(sample.rss_bytes for sample in self.host)

    @property
    def disturbance(self) -> str:
        """Why latencies of this block are unreliable: reduced clocks, a shared GPU. Empty if they are reliable."""
        reasons = []
        for gpu in self.gpus:
            if gpu.slowdowns or gpu.held_ns:
                reasons.append(f"GPU {gpu.index} held its clocks down ({_reasons(gpu)})")
            if gpu.is_shared:
                reasons.append(f"GPU {gpu.index} was shared with another process")
        return "; ".join(reasons)

    def lines(self) -> list[str]:
        """The card as lines of text."""
        lines = [f"watched {seconds_text(self.duration_ns)}, {plural(len(self.host), 'sample')}", _host_line(self)]
        for gpu in self.gpus:
            lines += _gpu_lines(gpu)
        return lines + [f"note: {note}" for note in self.notes]


def _host_line(card: PerfCard) -> str:
    memory = [sample.rss_bytes for sample in card.host]
    parts = [
        _span("load", [sample.load_average for sample in card.host], "{:.2f}".format),
        _span("CPU", [sample.cpu_mhz for sample in card.host], "{:.0f}".format, " MHz"),
        f"governor {card.host[-1].governor}" if card.host[-1].governor else "",
        _span("swap", [sample.swap_used_bytes or None for sample in card.host], bytes_text),
        _span("process", memory, bytes_text),
        f"highest {bytes_text(card.peak_rss_bytes)}" if card.peak_rss_bytes > max(memory[0], memory[-1]) else "",
    ]
    return f"host: {', '.join(filter(None, parts))}"


def _gpu_lines(gpu: GpuCard) -> list[str]:
    samples = gpu.samples
    top = f" of {gpu.max_sm_clock_mhz}" if gpu.max_sm_clock_mhz is not None else ""
    parts = [
        _span("SM", [sample.sm_clock_mhz for sample in samples], "{:.0f}".format, f"{top} MHz"),
        _span("", [sample.temperature_c for sample in samples], "{:.0f}".format, " °C"),
        _span("", [sample.power_w for sample in samples], "{:.0f}".format, " W"),
        _span("memory", [sample.memory_used_bytes for sample in samples], bytes_text),
    ]
    lines = [f"GPU {gpu.index} {gpu.name}: {', '.join(filter(None, parts)) or 'no reading'}"]
    if gpu.slowdowns or gpu.held_ns:
        lines.append(f"  clocks held down: {_reasons(gpu)}")
    lines += [f"  {line}" for line in _policy_lines(gpu)]
    if gpu.is_shared:
        most = max(sample.other_processes or 0 for sample in samples)
        lines.append(f"  shared with {plural(most, 'other process')}")
    return lines


def _reasons(gpu: GpuCard) -> str:
    """``power cap, power limit for 12 ms``: the reasons of the samples, then those of the counters."""
    held = [f"{limit} for {seconds_text(held_ns)}" for limit, held_ns in gpu.held_ns.items()]
    return ", ".join([*gpu.slowdowns, *held])


def _policy_lines(gpu: GpuCard) -> list[str]:
    """The settings of the GPU that are not the default and affect latencies."""
    lines = []
    if gpu.power_limit_w is not None and gpu.default_power_limit_w not in (None, gpu.power_limit_w):
        lines.append(f"power limit {gpu.power_limit_w:.0f} W; by default {gpu.default_power_limit_w:.0f} W")
    if gpu.is_persistent is False:
        lines.append("persistence mode is off: the first process that uses the GPU must load the driver")
    if gpu.is_partitioned:
        lines.append("multi-instance mode is on: other parts of this GPU may be busy")
    if gpu.ecc_errors:
        lines.append(f"{plural(gpu.ecc_errors, 'uncorrected memory error')} since the driver was loaded")
    return lines


def _span(name: str, values: Sequence[float | None], text: Callable[[float], str], unit: str = "") -> str:
    """``load 0.50 -> 1.20``, or one number if both are equal, or nothing without readings."""
    read = [text(value) for value in values if value is not None]
    if not read:
        return ""
    numbers = read[0] if read[0] == read[-1] else f"{read[0]} -> {read[-1]}"
    return f"{name} {numbers}{unit}".lstrip()
