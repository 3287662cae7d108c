"""``pytest-cudagraph doctor``: what can be told of this machine without measuring."""

from __future__ import annotations

import argparse
import sys
from importlib import metadata

from pytest_cudagraph import report
from pytest_cudagraph.cli.answer import Answer
from pytest_cudagraph.errors import CudagraphError
from pytest_cudagraph.units import plural


def examine(arguments: argparse.Namespace) -> Answer:
    """Versions, device and load; raises :class:`~pytest_cudagraph.errors.CudagraphError` without torch."""
    versions = [f"{name} {version(name)}" for name in ("pytest", "pytest-benchmark", "torch")]
    lines = [
        f"pytest-cudagraph {version('pytest-cudagraph')}, python {sys.version.split()[0]}, {', '.join(versions)}",
        *_device_lines(),
        f"nvml: {_nvml()}",
        f"load: {_load()}",
        "noise floor: not measured",
    ]
    return Answer(lines=lines)


def _device_lines() -> list[str]:
    try:
        from pytest_cudagraph import device
    except ImportError as exc:
        raise CudagraphError(f"torch cannot be imported: {exc}") from exc
    choice = device.choose("auto", require_gpu=False)
    judged = "speed is judged" if choice.judged else f"speed is not judged: {choice.reason}"
    info = device.describe(choice.kind)
    host = f"host: {info.host_cpu}, {plural(info.threads, 'torch thread')}, {info.platform}"
    return [f"device: {report.device_text(info)}; {judged}", host]


def _nvml() -> str:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as exc:
        return f"not usable ({exc})"
    try:
        return f"driver {pynvml.nvmlSystemGetDriverVersion()}, {plural(pynvml.nvmlDeviceGetCount(), 'GPU')}"
    finally:
        pynvml.nvmlShutdown()


def _load() -> str:
    import psutil

    minute, _, _ = psutil.getloadavg()
    return f"{minute:.1f} over the last minute, on {plural(psutil.cpu_count() or 1, 'CPU')}"


def version(distribution: str) -> str:
    """The installed version of a distribution, or that there is none; nothing is imported."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
