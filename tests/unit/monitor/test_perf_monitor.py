"""What the monitor says of host and GPUs, and that nothing it cannot read stops anything."""

import os
import sys
import threading
import warnings
from types import SimpleNamespace

import psutil
import pytest
import torch
from tests.fake_clock import FakeClock
from tests.fake_nvml import GIB, UUID, FakeNvml

from pytest_cudagraph.errors import InputError
from pytest_cudagraph.monitor import GpuCard, GpuSample, HostSample, PerfCard, PerfMonitor

EVERY_READING = {
    name: "Not Supported"
    for name in dir(FakeNvml)
    if name.startswith("nvmlDeviceGet") and name != "nvmlDeviceGetHandleByUUID"
}


@pytest.fixture
def gpu(monkeypatch):
    """One GPU that torch sees, read through the given NVML."""

    def set_up(nvml):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        properties = SimpleNamespace(name="NVIDIA H200", uuid=UUID)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return nvml

    return set_up


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def watched():
    with PerfMonitor() as watch:
        pass
    return watch.card


def test_the_time_is_that_of_the_body_by_the_clock_handed_in(no_gpu):
    clock = FakeClock()
    with PerfMonitor(clock=clock) as watch:
        clock.time_ns += 2_500
    assert watch.card.duration_ns == 2_500


def test_readings_are_taken_before_after_and_on_demand(gpu):
    nvml = gpu(FakeNvml())
    with PerfMonitor() as watch:
        nvml.clock_mhz = 1200
        watch.sample()
        nvml.clock_mhz = 1755
    assert len(watch.card.host) == 3
    assert [sample.sm_clock_mhz for sample in watch.card.gpus[0].samples] == [1980, 1200, 1755]


def test_a_gpu_is_read_by_its_uuid_in_words_and_units(gpu):
    nvml = gpu(FakeNvml(pids=[os.getpid(), 11, 12]))
    card = watched()
    sample = GpuSample(
        sm_clock_mhz=1980,
        temperature_c=61,
        power_w=652.3,
        memory_used_bytes=3 * GIB,
        slowdowns=("power cap", "heat (hardware)"),
        other_processes=2,
        held_ns={"power limit": 5_000_000, "heat limit": 0},
        utilization_ratio=0.7,
    )
    assert card.gpus == (
        GpuCard(
            index=0,
            name="NVIDIA H200",
            max_sm_clock_mhz=1980,
            samples=(sample, sample),
            power_limit_w=500.0,
            default_power_limit_w=700.0,
            is_persistent=False,
            is_partitioned=True,
            ecc_errors=2,
        ),
    )
    assert card.notes == ()
    assert nvml.open == 0


@pytest.mark.parametrize(("pids", "others"), [([], 0), ([7], 0), ([7, 8], 1), ([os.getpid()], 0)])
def test_one_process_of_a_container_that_hides_numbers_is_taken_for_ours(gpu, pids, others):
    gpu(FakeNvml(pids=pids))
    assert watched().gpus[0].samples[0].other_processes == others


def test_without_a_gpu_the_host_is_read_and_one_note_says_so(no_gpu):
    card = watched()
    assert card.gpus == ()
    assert card.notes == ("no GPU readings: torch sees no GPU",)
    assert card.peak_rss_bytes > 0


def test_without_nvml_the_host_is_read_and_one_note_says_why(gpu):
    gpu(FakeNvml(failing={"nvmlInit": "NVML Shared Library Not Found"}))
    assert watched().notes == ("no GPU readings: NVML Shared Library Not Found",)


def test_a_reading_that_is_not_supported_is_left_out_with_one_note(gpu):
    gpu(FakeNvml(failing={"nvmlDeviceGetPowerUsage": "Not Supported", "nvmlDeviceGetTemperature": "Not Supported"}))
    card = watched()
    assert (card.gpus[0].samples[0].power_w, card.gpus[0].samples[0].sm_clock_mhz) == (None, 1980)
    assert card.notes == ("GPU 0: no power, temperature (Not Supported)",)


def test_a_reading_without_permission_is_left_out_beside_others(gpu):
    refused = {"nvmlDeviceGetComputeRunningProcesses": "Insufficient Permissions"}
    gpu(FakeNvml(failing={**refused, "nvmlDeviceGetPowerUsage": "Not Supported"}))
    card = watched()
    assert card.gpus[0].samples[0].other_processes is None
    assert not card.gpus[0].is_shared
    assert set(card.notes) == {"GPU 0: no power (Not Supported)", "GPU 0: no processes (Insufficient Permissions)"}


def test_a_gpu_that_gets_lost_on_the_way_leaves_the_earlier_readings(gpu):
    nvml = gpu(FakeNvml())
    with PerfMonitor() as watch:
        nvml.failing = dict.fromkeys(EVERY_READING, "GPU is lost")
    first, last = watch.card.gpus[0].samples
    assert first.sm_clock_mhz == 1980
    assert last == GpuSample(
        sm_clock_mhz=None,
        temperature_c=None,
        power_w=None,
        memory_used_bytes=None,
        slowdowns=(),
        other_processes=None,
    )
    assert watch.card.notes == ("GPU 0: no power, memory, processes, clock, temperature, slowdowns (GPU is lost)",)


def test_a_limit_that_held_between_two_readings_is_caught_by_its_counter(gpu):
    nvml = gpu(FakeNvml())
    nvml.reasons = 0
    with PerfMonitor() as watch:
        assert watch.check() == ""
        nvml.held_ns[0] += 12_000_000
        assert watch.check() == "GPU 0 held its clocks down (power limit for 12 ms)"
        assert watch.check() == ""
    assert watch.card.gpus[0].held_ns == {"power limit": 12_000_000}
    assert watch.card.disturbance == "GPU 0 held its clocks down (power limit for 12 ms)"


def test_settings_that_a_gpu_does_not_have_are_no_notes(gpu):
    settings = (
        "EnforcedPowerLimit",
        "PowerManagementDefaultLimit",
        "PersistenceMode",
        "MigMode",
        "TotalEccErrors",
        "UtilizationRates",
    )
    refused = [f"nvmlDeviceGet{name}" for name in (*settings, "ViolationStatus")]
    gpu(FakeNvml(failing=dict.fromkeys(refused, "Not Supported")))
    card = watched()
    found = card.gpus[0]
    assert card.notes == ()
    assert found.held_ns == {}
    assert found.samples[0].utilization_ratio is None
    assert (found.power_limit_w, found.is_persistent, found.is_partitioned, found.ecc_errors) == (None,) * 4


def test_a_thread_reads_in_between_and_ends_with_the_block(no_gpu):
    read_by = []

    class Monitor(PerfMonitor):
        def sample(self):
            super().sample()
            read_by.append(threading.current_thread())

    before = threading.active_count()
    with Monitor(every_s=1e-4) as watch:
        while len(read_by) < 4:
            pass
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
    assert len(watch.card.host) >= 5


@pytest.mark.parametrize("every_s", [0, -1.0, float("nan"), float("inf"), "a", True])
def test_an_interval_that_is_none_is_refused(every_s):
    with pytest.raises(InputError) as caught:
        PerfMonitor(every_s=every_s)
    assert str(caught.value) == f"every_s must be a number of seconds above 0, or None; found {every_s!r}"


def test_a_gpu_that_nvml_does_not_know_is_a_note(gpu):
    gpu(FakeNvml(failing={"nvmlDeviceGetHandleByUUID": "Not Found"}))
    card = watched()
    assert (card.gpus, card.notes) == ((), ("GPU 0: no readings (Not Found)",))


def test_a_gpu_that_torch_cannot_describe_is_a_note(gpu, monkeypatch):
    def fail(index):
        raise RuntimeError("CUDA unknown error")

    gpu(FakeNvml())
    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    assert watched().notes == ("GPU 0: no readings (CUDA unknown error)",)


def test_a_gpu_whose_partition_is_only_planned_is_whole(gpu, monkeypatch):
    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetMigMode", lambda nvml, handle: [0, 1])  # now, and after a restart
    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetPersistenceMode", lambda nvml, handle: 1)
    gpu(FakeNvml())
    (card,) = watched().gpus
    assert (card.is_partitioned, card.is_persistent) == (False, True)


def test_a_torch_that_tells_no_uuid_is_a_note(gpu, monkeypatch):
    gpu(FakeNvml())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name="AMD Instinct MI300X"))
    (note,) = watched().notes
    assert note.startswith("GPU 0: no readings (")
    assert "uuid" in note


def test_a_slice_of_a_gpu_is_read_by_its_own_uuid(gpu):
    gpu(FakeNvml()).uuid = f"MIG-{UUID}"
    assert [sample.sm_clock_mhz for sample in watched().gpus[0].samples] == [1980, 1980]


def test_every_gpu_that_torch_sees_is_watched_under_torchs_index(gpu, monkeypatch):
    gpu(FakeNvml())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [card.index for card in watched().gpus] == [0, 1]


def test_without_a_context_of_ours_every_process_on_the_gpu_is_another(gpu, monkeypatch):
    gpu(FakeNvml(pids=[7]))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert watched().gpus[0].samples[0].other_processes == 1


def test_bindings_that_know_no_counters_cost_the_counters_and_no_note(gpu, monkeypatch):
    for name in ("NVML_PERF_POLICY_POWER", "NVML_PERF_POLICY_THERMAL", "NVML_MEMORY_ERROR_TYPE_UNCORRECTED"):
        monkeypatch.delattr(FakeNvml, name)
    gpu(FakeNvml())
    card = watched()
    assert (card.gpus[0].held_ns, card.gpus[0].ecc_errors, card.notes) == ({}, None, ())


def test_a_card_without_a_sample_was_held_by_nothing():
    assert GpuCard(index=0, name="NVIDIA T4", max_sm_clock_mhz=None, samples=()).held_ns == {}


def test_what_torch_warns_of_a_driver_does_not_reach_the_watched_code(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(warnings.warn("driver too old", stacklevel=1)))
    assert watched().gpus == ()


def test_an_older_driver_is_asked_by_the_older_name(gpu):
    gpu(FakeNvml(failing={"nvmlDeviceGetCurrentClocksEventReasons": "Function Not Found"}))
    card = watched()
    assert card.gpus[0].slowdowns == ("power cap", "heat (hardware)")
    assert card.notes == ()


def test_an_older_pynvml_costs_a_reading_and_no_more(gpu, monkeypatch):
    monkeypatch.delattr(FakeNvml, "nvmlDeviceGetMemoryInfo")
    gpu(FakeNvml())
    card = watched()
    assert card.gpus[0].samples[0].memory_used_bytes is None
    assert card.notes == ("GPU 0: no memory (pynvml is too old)",)


def test_nvml_that_does_not_shut_down_is_a_note(gpu):
    gpu(FakeNvml(failing={"nvmlShutdown": "Unknown Error"}))
    assert watched().notes == ("NVML did not shut down (Unknown Error)",)


def test_a_host_without_clock_or_load_is_read_as_far_as_it_goes(no_gpu, monkeypatch):
    def refuse():
        raise PermissionError("/sys/devices/system/cpu")

    monkeypatch.setattr(psutil, "cpu_freq", refuse)
    monkeypatch.delattr(psutil, "getloadavg")
    sample = watched().host[0]
    assert (sample.load_average, sample.cpu_mhz) == (None, None)
    assert sample.rss_bytes > 0


def test_the_card_is_there_only_after_the_block_even_if_it_raised(no_gpu):
    monitor = PerfMonitor()
    with pytest.raises(RuntimeError, match=r"^PerfMonitor\.sample\(\) works only inside the with block$"):
        monitor.sample()
    with monitor, pytest.raises(RuntimeError, match=r"^PerfMonitor\.card is available after"):
        _ = monitor.card
    with pytest.raises(ValueError, match="body"), monitor:
        raise ValueError("body")
    assert len(monitor.card.host) == 2


def gpu_sample(clock, temperature, power, used, slowdowns=(), others=0):
    return GpuSample(
        sm_clock_mhz=clock,
        temperature_c=temperature,
        power_w=power,
        memory_used_bytes=used,
        slowdowns=slowdowns,
        other_processes=others,
    )


def test_a_card_in_words(golden):
    hosts = [
        HostSample(load_average=0.5, cpu_mhz=2300.0, rss_bytes=512 * 2**20),
        HostSample(load_average=1.0, cpu_mhz=2300.0, rss_bytes=700 * 2**20),
        HostSample(
            load_average=1.204, cpu_mhz=2300.0, rss_bytes=600 * 2**20, swap_used_bytes=2**30, governor="powersave"
        ),
    ]
    busy = [
        gpu_sample(1980, 45, 120.0, GIB),
        gpu_sample(1500, 70, 690.0, 3 * GIB, ("power cap", "heat (hardware)"), others=2),
        gpu_sample(1755, 61, 652.3, 3 * GIB, ("power cap",), others=1),
    ]
    silent = [gpu_sample(None, None, None, None, others=None)] * 2
    card = PerfCard(
        duration_ns=1_234_000_000,
        host=tuple(hosts),
        gpus=(
            GpuCard(
                index=0,
                name="NVIDIA H200",
                max_sm_clock_mhz=1980,
                samples=tuple(busy),
                power_limit_w=500.0,
                default_power_limit_w=700.0,
                is_persistent=False,
                is_partitioned=True,
                ecc_errors=1,
            ),
            GpuCard(index=1, name="NVIDIA T4", max_sm_clock_mhz=None, samples=tuple(silent)),
        ),
        notes=("GPU 1: no clock, temperature, power, memory (Insufficient Permissions)",),
    )
    bare = PerfCard(
        duration_ns=5_000_000,
        host=(HostSample(load_average=None, cpu_mhz=None, rss_bytes=2**20),),
        notes=("no GPU readings: torch sees no GPU",),
    )
    golden("perf-card.txt", "\n".join([*card.lines(), "", *bare.lines()]))
