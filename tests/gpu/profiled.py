"""What the GPU really ran, by the profiler's own trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def device_work(call, folder: Path) -> list[str]:
    """The names of all kernels, copies and fills that one ``call`` ran, replayed graphs included."""
    path = folder / "trace.json"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    seen.export_chrome_trace(str(path))
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [event["name"] for event in events if event.get("cat") in WORK]


def wake_profiler(folder: Path) -> None:
    """Load CUPTI, which sees only graphs made after it is there; skip where it is not allowed to see anything."""
    number = torch.zeros(8, device="cuda")
    device_work(lambda: number.add_(1), folder)
    if not device_work(lambda: number.add_(1), folder):
        pytest.skip("the profiler sees no kernel on this machine (CUPTI is missing, or not permitted)")
