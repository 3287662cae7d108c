"""``pynvml`` without a driver: one GPU that answers what a test sets."""

from __future__ import annotations

from types import SimpleNamespace

UUID = "c4ec2d3e-0000-1111-2222-333344445555"
HANDLE = "handle 1"
GIB = 2**30


class FakeNvml:
    """``failing`` names the calls that raise, or maps them to the error's text."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0
    nvmlClocksEventReasonGpuIdle, nvmlClocksEventReasonSwPowerCap = 1, 4
    nvmlClocksThrottleReasonHwThermalSlowdown = 64
    NVML_PERF_POLICY_POWER, NVML_PERF_POLICY_THERMAL = 0, 1
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0

    class NVMLError(Exception):
        pass

    def __init__(self, count=1, *, failing=(), uuid=f"GPU-{UUID}", pids=(), clock_mhz=1980):
        self.failing = failing if isinstance(failing, dict) else {name: f"{name} fails" for name in failing}
        self.count, self.uuid, self.pids, self.clock_mhz = count, uuid, [*pids], clock_mhz
        self.reasons = 1 | 4 | 64
        self.held_ns = {0: 5_000_000, 1: 0}
        self.open = 0

    def answer(self, name, value=None):
        if name in self.failing:
            raise self.NVMLError(self.failing[name])
        return value

    def nvmlInit(self):
        self.answer("nvmlInit")
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1
        self.answer("nvmlShutdown")

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != self.uuid:
            raise self.NVMLError("Not Found")
        return self.answer("nvmlDeviceGetHandleByUUID", HANDLE)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.answer("nvmlDeviceGetHandleByIndex", HANDLE)


def _uncorrected_errors(nvml, kind, counter):
    assert (kind, counter) == (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    return 2


def _clock(nvml, which):
    assert which == nvml.NVML_CLOCK_SM
    return nvml.clock_mhz


_READINGS = {
    "nvmlDeviceGetClockInfo": _clock,
    "nvmlDeviceGetMaxClockInfo": lambda nvml, which: 1980,
    "nvmlDeviceGetApplicationsClock": lambda nvml, which: nvml.clock_mhz,
    "nvmlDeviceGetDefaultApplicationsClock": lambda nvml, which: 1980,
    "nvmlDeviceGetTemperature": lambda nvml, which: 61,
    "nvmlDeviceGetPowerUsage": lambda nvml: 652_300,
    "nvmlDeviceGetUtilizationRates": lambda nvml: SimpleNamespace(gpu=70, memory=30),
    "nvmlDeviceGetMemoryInfo": lambda nvml: SimpleNamespace(used=3 * GIB),
    "nvmlDeviceGetComputeRunningProcesses": lambda nvml: [SimpleNamespace(pid=pid) for pid in nvml.pids],
    "nvmlDeviceGetEnforcedPowerLimit": lambda nvml: 500_000,
    "nvmlDeviceGetPowerManagementDefaultLimit": lambda nvml: 700_000,
    "nvmlDeviceGetPersistenceMode": lambda nvml: 0,
    "nvmlDeviceGetMigMode": lambda nvml: [1, 1],
    "nvmlDeviceGetTotalEccErrors": _uncorrected_errors,
    "nvmlDeviceGetViolationStatus": lambda nvml, policy: SimpleNamespace(
        referenceTime=9, violationTime=nvml.held_ns[policy]
    ),
    "nvmlDeviceGetCurrentClocksEventReasons": lambda nvml: nvml.reasons,
    "nvmlDeviceGetCurrentClocksThrottleReasons": lambda nvml: nvml.reasons,
}


def _of_the_device(name, read):
    def call(self, handle, *arguments):
        assert handle == HANDLE
        return self.answer(name, read(self, *arguments))

    return call


def _of_the_driver(name, read):
    return lambda self: self.answer(name, read(self))


for _name, _read in _READINGS.items():
    setattr(FakeNvml, _name, _of_the_device(_name, _read))
FakeNvml.nvmlDeviceGetCount = _of_the_driver("nvmlDeviceGetCount", lambda nvml: nvml.count)
FakeNvml.nvmlSystemGetDriverVersion = _of_the_driver("nvmlSystemGetDriverVersion", lambda nvml: "580.159")
