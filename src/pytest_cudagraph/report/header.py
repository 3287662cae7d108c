"""What this run works on, in one line."""

from __future__ import annotations

from pytest_cudagraph.units import factor_text
from pytest_cudagraph.values import DeviceInfo


def device_text(device: DeviceInfo) -> str:
    """``NVIDIA H200, driver 580.159, torch 2.11.0``; a CPU is called one: ``cpu: AMD EPYC 9B45, torch 2.13.0``."""
    name = f"cpu: {device.name}" if device.kind == "cpu" else device.name
    driver = f", driver {device.driver}" if device.driver else ""
    return f"{name}{driver}, torch {device.torch}"


def header(device: DeviceInfo, *, baseline: str, min_speedup: float, judged: bool) -> str:
    """The line above the tests; ``judged`` is false in a rehearsal, where speed is shown and not gated."""
    gate = f"gate {factor_text(min_speedup)}" if judged else "rehearsal: speed is not judged"
    return f"cudagraph: {device_text(device)}; baseline {baseline}; {gate}"
