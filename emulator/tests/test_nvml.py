"""The emulated NVML tells of the emulated device what torch knows of it, and whatever a test wants beside."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import cuda_emulator
import pynvml
import pytest
import torch
from cuda_emulator.nvml import answering

GIB = 2**30
SPEAKS = "import pynvml; pynvml.nvmlInit(); gpu = pynvml.nvmlDeviceGetHandleByIndex(0); "


@pytest.fixture
def gpu():
    pynvml.nvmlInit()
    yield pynvml.nvmlDeviceGetHandleByIndex(0)
    pynvml.nvmlShutdown()


def printed(code, **variables):
    environment = {**os.environ, **variables}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def processes(gpu):
    return {each.pid: each.usedGpuMemory for each in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)}


# Which device


def test_the_device_is_torchs_by_name_uuid_and_bus(gpu):
    of_torch = torch.cuda.get_device_properties(0)
    assert pynvml.nvmlDeviceGetName(gpu) == of_torch.name == cuda_emulator.DEVICE_NAME
    assert pynvml.nvmlDeviceGetUUID(gpu) == f"GPU-{of_torch.uuid}"
    bus = pynvml.nvmlDeviceGetPciInfo(gpu)
    assert (bus.domain, bus.bus, bus.device) == (
        of_torch.pci_domain_id, of_torch.pci_bus_id, of_torch.pci_device_id
    )  # fmt: skip
    for found in (
        pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{of_torch.uuid}"),
        pynvml.nvmlDeviceGetHandleByPciBusId(bus.busId),
        pynvml.nvmlDeviceGetHandleByPciBusId(bus.busIdLegacy),
    ):
        assert pynvml.nvmlDeviceGetUUID(found) == pynvml.nvmlDeviceGetUUID(gpu)


def test_there_are_as_many_devices_as_torch_has_each_with_its_own_uuid():
    code = (
        "import pynvml, torch; pynvml.nvmlInit(); count = pynvml.nvmlDeviceGetCount()\n"
        "for i in range(count): print(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(i)))\n"
        "for i in range(torch.cuda.device_count()): print(f'GPU-{torch.cuda.get_device_properties(i).uuid}')\n"
    )
    uuids = printed(code, CUDA_EMULATOR_DEVICES="3")
    assert uuids[:3] == uuids[3:]
    assert len(set(uuids)) == 3


@pytest.mark.parametrize(
    ("ask", "code"),
    [
        (lambda: pynvml.nvmlDeviceGetHandleByIndex(1), pynvml.NVML_ERROR_INVALID_ARGUMENT),
        (lambda: pynvml.nvmlDeviceGetHandleByUUID("GPU-c4ec2d3e"), pynvml.NVML_ERROR_NOT_FOUND),
        (lambda: pynvml.nvmlDeviceGetHandleByPciBusId("0000:09:00.0"), pynvml.NVML_ERROR_NOT_FOUND),
    ],
)
def test_a_device_that_is_not_there_is_refused(gpu, ask, code):
    with pytest.raises(pynvml.NVMLError) as raised:
        ask()
    assert raised.value.value == code


def test_nothing_is_answered_before_the_start_or_after_the_end(gpu):
    pynvml.nvmlInit()
    pynvml.nvmlShutdown()
    assert pynvml.nvmlDeviceGetCount() == 1  # the first start still counts
    pynvml.nvmlShutdown()
    try:
        for ask in (pynvml.nvmlDeviceGetCount, lambda: pynvml.nvmlDeviceGetPowerUsage(gpu)):
            with pytest.raises(pynvml.NVMLError) as raised:
                ask()
            assert raised.value.value == pynvml.NVML_ERROR_UNINITIALIZED
    finally:
        pynvml.nvmlInit()


def test_what_it_lacks_is_absent_as_in_an_older_driver(gpu):
    with pytest.raises(pynvml.NVMLError) as raised:
        pynvml.nvmlDeviceGetFanSpeed(gpu)
    assert raised.value.value == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND


# Memory and processes


def test_memory_is_what_torch_holds_now(gpu):
    torch.cuda.empty_cache()
    before = pynvml.nvmlDeviceGetMemoryInfo(gpu)
    held = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    now = pynvml.nvmlDeviceGetMemoryInfo(gpu)
    assert now.used == cuda_emulator.used_bytes()
    assert now.used - before.used == held.nbytes
    assert now.free == now.total - now.used
    assert now.total == torch.cuda.get_device_properties(0).total_memory
    assert processes(gpu) == {os.getpid(): now.used}


def test_a_process_that_has_not_used_the_device_is_not_listed():
    assert printed(SPEAKS + "print(len(pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)))") == ["0"]


def test_another_process_holds_its_part_of_the_memory(gpu):
    own = torch.zeros(1, device="cuda")
    used = pynvml.nvmlDeviceGetMemoryInfo(gpu).used
    with answering({"nvmlDeviceGetComputeRunningProcesses": {4242: GIB, 17: 0}}):
        assert processes(gpu) == {os.getpid(): used, 4242: GIB, 17: 0}
        assert pynvml.nvmlDeviceGetMemoryInfo(gpu).used == used + GIB
    assert processes(gpu) == {os.getpid(): used}
    assert own.item() == 0


def test_torch_names_the_other_process_when_memory_is_out():
    with answering({"nvmlDeviceGetComputeRunningProcesses": {4242: GIB}}), pytest.raises(torch.OutOfMemoryError) as out:
        torch.zeros(1 << 50, device="cuda")
    assert "Process 4242 has 1024.00 MiB memory in use" in str(out.value)


# Readings


def test_torch_reads_it():
    with answering({"nvmlDeviceGetUtilizationRates": 70, "nvmlDeviceGetTemperature": 61}):
        assert (torch.cuda.utilization(), torch.cuda.temperature()) == (70, 61)


def test_readings_change_when_they_are_replaced_and_return(gpu):
    def clock():
        return pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)

    usual = clock()
    with answering({"nvmlDeviceGetClockInfo": 600}) as replace:
        assert clock() == 600
        replace({"nvmlDeviceGetClockInfo": 700})
        assert clock() == 700
        replace({})
        assert clock() == usual
    assert "CUDA_EMULATOR_NVML" not in os.environ


def test_a_reading_of_one_argument_leaves_the_others(gpu):
    with answering({"nvmlDeviceGetViolationStatus.1": 5_000_000}):
        held = [pynvml.nvmlDeviceGetViolationStatus(gpu, policy).violationTime for policy in range(3)]
    assert held == [0, 5_000_000, 0]


def test_a_reading_of_one_device_is_seen_there_only_also_by_another_process():
    code = "for i in range(2): print(pynvml.nvmlDeviceGetTemperature(pynvml.nvmlDeviceGetHandleByIndex(i), 0))"
    with answering({"nvmlDeviceGetTemperature": 50, "1:nvmlDeviceGetTemperature": 80}):
        assert printed(f"{SPEAKS}\n{code}", CUDA_EMULATOR_DEVICES="2") == ["50", "80"]


@pytest.mark.parametrize(
    "function",
    [
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetComputeRunningProcesses",
        "nvmlDeviceGetMigMode",
    ],
)
def test_a_reading_can_be_refused(gpu, function):
    with answering({function: f"error {pynvml.NVML_ERROR_NO_PERMISSION}"}):
        with pytest.raises(pynvml.NVMLError_NoPermission, match="Insufficient Permissions"):
            getattr(pynvml, function)(gpu)
    getattr(pynvml, function)(gpu)


def test_torch_reads_the_device_by_nvml(gpu):
    # torch starts NVML by itself, with its first function
    library = ctypes.CDLL("libnvidia-ml.so.1")
    assert library.nvmlInit() == 0
    assert library.nvmlShutdown() == 0
    with answering({"nvmlDeviceGetTemperature": 71, "nvmlDeviceGetUtilizationRates": 30}):
        assert (torch.cuda.temperature(), torch.cuda.utilization()) == (71, 30)
    assert pynvml.nvmlDeviceGetCudaComputeCapability(gpu) == torch.cuda.get_device_capability()
    assert pynvml.nvmlDeviceGetIndex(gpu) == 0


@pytest.mark.parametrize("visible", ["0,2", "GPU-0001", "GPU-01"])
def test_torch_counts_the_visible_devices_by_nvml(visible):
    code = "from torch import cuda; print(cuda._device_count_nvml(), cuda.device_count(), cuda.is_initialized())"
    environment = {**os.environ, "CUDA_EMULATOR_DEVICES": "3", "CUDA_VISIBLE_DEVICES": visible}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    count = len(visible.split(","))
    assert done.stdout.split() == [str(count), str(count), "False"], done.stderr


def test_two_devices_are_peers_by_nvml():
    code = """
import pynvml
pynvml.nvmlInit()
gpus = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(2)]
print(pynvml.nvmlDeviceGetP2PStatus(*gpus, 0), pynvml.nvmlDeviceGetIndex(gpus[1]))
"""
    environment = {**os.environ, "CUDA_EMULATOR_DEVICES": "2"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["0", "1"], done.stderr
