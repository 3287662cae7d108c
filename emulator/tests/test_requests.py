"""What a test may ask of the device: small memory, failing allocations, several devices, a failed kernel."""

from __future__ import annotations

import os
import subprocess
import sys

import cuda_emulator
import pytest
import torch

GIB = 1 << 30


@pytest.fixture
def _memory_afterwards():
    yield
    cuda_emulator.set_memory(8 * GIB)
    cuda_emulator.fail_allocations(count=0)


@pytest.mark.usefixtures("_memory_afterwards")
def test_memory_that_is_too_small_is_torchs_own_error():
    torch.cuda.empty_cache()
    cuda_emulator.set_memory(cuda_emulator.used_bytes() + (64 << 20))
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 128\.00 MiB"):
        torch.empty(128 << 20, dtype=torch.uint8, device="cuda")


@pytest.mark.usefixtures("_memory_afterwards")
def test_an_allocation_fails_on_request_and_the_next_one_does_not():
    torch.cuda.empty_cache()
    cuda_emulator.fail_allocations(count=2)  # torch frees its cache and asks again
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
    assert torch.ones(32 << 20, dtype=torch.uint8, device="cuda").sum().item() == 32 << 20


def test_memory_given_back_is_counted():
    torch.cuda.empty_cache()
    before = cuda_emulator.used_bytes()
    held = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    assert cuda_emulator.used_bytes() - before == 64 << 20
    del held
    torch.cuda.empty_cache()
    assert cuda_emulator.used_bytes() == before


def test_a_failed_kernel_is_the_error_of_every_later_call():
    runtime = cuda_emulator._runtime()
    runtime.cuda_emulator_device_assert(b"index out of range")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="device-side assert triggered"):
            torch.cuda.synchronize()
    assert cuda_emulator.clear_error()
    torch.cuda.synchronize()


def run_on(devices, program):
    environment = {**os.environ, "CUDA_EMULATOR_DEVICES": str(devices)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    return done.stdout.strip() or done.stderr[-300:]


def test_there_are_as_many_devices_as_were_asked_for():
    program = """
import torch
first = torch.arange(4., device="cuda:0")
second = first.to("cuda:1")
print(torch.cuda.device_count(), second.device, (second * 2).tolist())
"""
    assert run_on(2, program) == "2 cuda:1 [0.0, 2.0, 4.0, 6.0]"


def test_no_device_is_a_machine_without_a_gpu():
    assert run_on(0, "import torch; print(torch.cuda.is_available())") == "False"


@pytest.mark.parametrize(
    ("visible", "seen"),
    [("1", "1"), ("2,0", "2 0"), ("GPU-01020304", "1"), ("0,7,1", "0"), ("GPU-0", ""), ("", "")],
)
def test_cuda_shows_the_visible_devices_and_nvml_shows_all(monkeypatch, visible, seen):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    program = """
import pynvml, torch
pynvml.nvmlInit()
uuids = [pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())]
assert len(uuids) == 3
shown = [f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(torch.cuda.device_count())]
if shown:
    torch.zeros(8, device=f"cuda:{len(shown) - 1}")
    handle = pynvml.nvmlDeviceGetHandleByUUID(shown[-1])
    assert len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)) == 1
print(*map(uuids.index, shown))
"""
    assert run_on(3, program) == seen
