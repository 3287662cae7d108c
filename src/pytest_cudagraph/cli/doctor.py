"""``pytest-cudagraph doctor``: the machine, its health, and the smallest regression it can detect."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import TYPE_CHECKING

from pytest_cudagraph import environment, report
from pytest_cudagraph.cli.output import FINE, REGRESSION, CommandOutput
from pytest_cudagraph.errors import CudagraphError
from pytest_cudagraph.settings.parsing import seconds
from pytest_cudagraph.units import latency_text, percent_text, plural
from pytest_cudagraph.values import is_emulated

if TYPE_CHECKING:
    from pytest_cudagraph.monitor import PerfCard
    from pytest_cudagraph.pipeline.noise_floor import NoiseFloor

_DEFAULT_BUDGET_S = 10.0

_UNFIT_DETECTABLE = 0.05
"""Limit of the smallest detectable regression with tolerance. Above it, usual gates of 5 to 10 % do not decide."""

_UNFIT_BIAS = 0.02
"""Limit of the measured difference between equal calls. Above it, clock or scheduler favour one of them."""

_COLUMNS = tuple(report.Column(title=title) for title in ("call", "noise", "against itself", "smallest regression"))


def add_command(command: argparse.ArgumentParser) -> None:
    """``doctor [--device ...] [--time-budget S]``."""
    command.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="as --cudagraph-device")
    command.add_argument(
        "--time-budget",
        type=_seconds,
        default=_DEFAULT_BUDGET_S,
        metavar="S",
        help="as --cudagraph-time-budget: the smallest regression is that of this budget",
    )
    command.set_defaults(run=examine)


def _seconds(text: str) -> float:
    try:
        return seconds(text)
    except ValueError as allowed:
        raise argparse.ArgumentTypeError(f"takes seconds, {allowed}; found {text!r}") from None


def examine(arguments: argparse.Namespace) -> CommandOutput:
    """Versions, device, health and noise floor; exit code 1 if the machine is unfit to judge speed.

    Raises :class:`~pytest_cudagraph.errors.CudagraphError` without torch, or for a missing device.
    """
    device_lines, unfit_device = _device(arguments.device)
    minute, cpus = _load()
    card, floors = _measured(arguments.device, arguments.time_budget)
    load = f"load {minute:.1f} on {plural(cpus, 'CPU')}"
    busy = [f"unfit: {load}: more processes than cores; stop other work"] if minute > cpus else []
    unfit = [*unfit_device, *busy, *_unfit(card, floors)]
    versions = [f"{name} {version(name)}" for name in ("pytest", "pytest-benchmark", "torch")]
    lines = [
        f"pytest-cudagraph {version('pytest-cudagraph')}, python {sys.version.split()[0]}, {', '.join(versions)}",
        *device_lines,
        f"nvml: {_nvml()}",
        f"load: {minute:.1f} over the last minute, on {plural(cpus, 'CPU')}",
        *card.lines(),
        f"noise floor: the same call against itself; smallest regression detectable within {arguments.time_budget:g} s",
        *report.grid(_COLUMNS, [_row(floor) for floor in floors]),
        *(unfit or ["fit: nothing found that prevents judging speed"]),
    ]
    return CommandOutput(lines=lines, exit_code=REGRESSION if unfit else FINE)


def _device(option: str) -> tuple[list[str], list[str]]:
    """The lines of the device and the host, and why no speed can be judged on a device of this kind."""
    try:
        from pytest_cudagraph import device
    except ImportError as exc:
        raise CudagraphError(f"torch cannot be imported: {exc}") from exc
    choice = device.choose(option, require_gpu=False)
    judged = "speed is judged" if choice.judged else f"speed is not judged: {choice.reason}"
    info = device.describe(choice.kind)
    host = f"host: {info.host_cpu}, {plural(info.threads, 'torch thread')}, {info.platform}"
    unfit = [f"unfit: {choice.reason}; {device.EMULATED.remedy}"] if is_emulated(info.name) else []
    return [f"device: {report.device_text(info)}; {judged}", host], unfit


def _measured(option: str, budget_s: float) -> tuple[PerfCard, list[NoiseFloor]]:
    from pytest_cudagraph import device
    from pytest_cudagraph.backends import open_backend
    from pytest_cudagraph.measure import PerfCounterClock
    from pytest_cudagraph.monitor import PerfMonitor
    from pytest_cudagraph.pipeline.noise_floor import noise_floors

    backend = open_backend(device.choose(option, require_gpu=False).kind)
    with PerfMonitor() as watch:
        floors = noise_floors(backend, PerfCounterClock(), budget_s=budget_s)
    return watch.card, floors


def _row(floor: NoiseFloor) -> list[str]:
    return [
        latency_text(floor.call_ns),
        _percent(floor.noise_ratio),
        f"{floor.apparent.estimate:.3f}x ({floor.apparent.low:.3f}-{floor.apparent.high:.3f})",
        _percent(_smallest_regression_ratio(floor)),
    ]


def _smallest_regression_ratio(floor: NoiseFloor) -> float:
    """Rounded to tenths of a percent, like the displayed value that it is compared with."""
    from pytest_cudagraph.pipeline.noise_floor import TOLERANCE_RATIO

    return round(TOLERANCE_RATIO + floor.detectable_ratio, 3)


def _percent(ratio: float) -> str:
    return percent_text(ratio) if math.isfinite(ratio) else "too few calls"


def _unfit(card: PerfCard, floors: Sequence[NoiseFloor]) -> Iterator[str]:
    if card.disturbance:
        yield f"unfit: {card.disturbance}; stop other work on the GPU, or raise its power limit and improve its cooling"
    for floor in floors:
        call = f"calls of {latency_text(floor.call_ns)}"
        bias = abs(floor.apparent.estimate - 1.0)
        if bias > _UNFIT_BIAS:
            yield f"unfit: equal {call} differ by {percent_text(bias)}; {_QUIET}"
        if _smallest_regression_ratio(floor) > _UNFIT_DETECTABLE:
            seen = _row(floor)[-1]
            yield f"unfit: smallest detectable regression of {call}: {seen}; {_QUIET}, or use a larger --time-budget"


_QUIET = "stop other work, or pin the job to its own cores"


def _nvml() -> str:
    nvml = environment.start_nvml()
    if isinstance(nvml, str):
        return f"not usable ({nvml})"
    try:
        return f"driver {nvml.nvmlSystemGetDriverVersion()}, {plural(nvml.nvmlDeviceGetCount(), 'GPU')}"
    except nvml.NVMLError as exc:
        return f"not usable ({exc})"
    finally:
        environment.stop_nvml(nvml)


def _load() -> tuple[float, int]:
    """The load of the last minute, and the number of CPUs. It is read before the measurement."""
    import psutil

    minute, _, _ = psutil.getloadavg()
    return float(minute), psutil.cpu_count() or 1


def version(distribution: str) -> str:
    """The version of an installed distribution, without importing it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
