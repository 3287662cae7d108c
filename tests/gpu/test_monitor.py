"""What NVML tells is what nvidia-smi tells. What the emulated device's NVML tells is what the test says."""

from __future__ import annotations

import shutil
import subprocess

import pynvml
import pytest
import torch

from pytest_cudagraph import CallMonitor, GraphRunner, device
from pytest_cudagraph.monitor import PerfMonitor


@pytest.fixture
def smi():
    """Ask nvidia-smi for one figure of the GPU torch calls 0, found by its UUID."""
    if shutil.which("nvidia-smi") is None:
        pytest.skip("nvidia-smi is not on the path")
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    which = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"

    def ask(figure):
        command = ["nvidia-smi", "-i", which, f"--query-gpu={figure}", "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode:
            pytest.skip(f"nvidia-smi does not answer: {done.stdout.strip() or done.stderr.strip()}")
        return done.stdout.strip()

    return ask


def watched():
    with PerfMonitor() as watch:
        work = torch.randn(512, 512, device="cuda")
        for _ in range(20):
            work = (work @ work) / 64
        torch.cuda.synchronize()
        watch.sample()
    return watch.card


def test_the_card_names_the_gpu_and_reads_every_figure():
    card = watched()
    assert card.gpus, card.notes
    gpu = card.gpus[0]
    assert gpu.name == torch.cuda.get_device_name(0)
    assert len(gpu.samples) == 3
    sample = gpu.samples[-1]
    assert None not in (sample.sm_clock_mhz, sample.temperature_c, sample.power_w, sample.memory_used_bytes), card.notes


def test_driver_and_name_are_those_of_nvidia_smi(smi):
    described = device.describe("cuda")
    assert described.driver == smi("driver_version")
    assert described.name == smi("name")


def test_clock_limit_and_memory_are_those_of_nvidia_smi(smi):
    gpu = watched().gpus[0]
    assert gpu.max_sm_clock_mhz == int(smi("clocks.max.sm"))
    used_mib = gpu.samples[-1].memory_used_bytes / 2**20
    # NVML's first interface counts what the driver reserves for itself, nvidia-smi does not: some hundred MiB.
    assert abs(used_mib - int(smi("memory.used"))) < 1500


def test_temperature_is_that_of_nvidia_smi(smi):
    assert abs(watched().gpus[0].samples[-1].temperature_c - int(smi("temperature.gpu"))) <= 10


def test_limits_and_modes_are_those_of_nvidia_smi(smi):
    gpu = watched().gpus[0]
    assert gpu.power_limit_w == pytest.approx(float(smi("power.limit")), abs=1)
    assert gpu.default_power_limit_w == pytest.approx(float(smi("power.default_limit")), abs=1)
    assert gpu.is_persistent == (smi("persistence_mode") == "Enabled")
    assert bool(gpu.is_partitioned) == (smi("mig.mode.current") == "Enabled")


def test_a_check_takes_one_more_reading_and_names_whatever_held_the_gpu():
    with PerfMonitor() as watch:
        found = watch.check()
    first, second = watch.card.gpus[0].samples[:2]
    assert bool(found) == bool(first.slowdowns or second.slowdowns or watch.card.disturbance)


REASONS = "nvmlDeviceGetCurrentClocksEventReasons"


def test_a_check_names_a_throttle_while_it_lasts_and_not_after(answering):
    with PerfMonitor() as watch:
        before = watch.check()
        with answering({REASONS: pynvml.nvmlClocksEventReasonSwPowerCap}):
            during = watch.check()
        watch.check()  # from the throttle to now
        after = watch.check()
    assert (before, during, after) == ("", "GPU 0 held its clocks down (power cap)", "")


def test_a_throttle_between_two_readings_is_known_by_its_counter(answering):
    counter = f"nvmlDeviceGetViolationStatus.{pynvml.NVML_PERF_POLICY_THERMAL}"
    with answering({counter: 3_000_000}) as replace:
        with PerfMonitor() as unchanged:
            pass
        with PerfMonitor() as grown:
            replace({counter: 5_000_000})
    assert unchanged.card.disturbance == ""
    assert grown.card.disturbance == "GPU 0 held its clocks down (heat limit for 2 ms)"


def test_another_process_is_named_and_this_one_is_not(answering):
    assert not watched().gpus[0].is_shared
    with answering({"nvmlDeviceGetComputeRunningProcesses": {4242: 2**30, 4243: 0}}):
        card = watched()
    assert card.disturbance == "GPU 0 was shared with another process"
    assert "  shared with 2 other processes" in card.lines()
    assert card.gpus[0].samples[-1].memory_used_bytes > 2**30


def test_a_reading_that_the_driver_refuses_is_a_note_and_the_others_are_there(answering):
    with answering({"nvmlDeviceGetPowerUsage": "error 4", "nvmlDeviceGetMigMode": "error 3"}):
        card = watched()
    assert card.notes == ("GPU 0: no power (Insufficient Permissions)",)
    assert card.gpus[0].samples[-1].temperature_c is not None


def test_an_older_driver_is_asked_by_the_older_name(answering):
    older = {REASONS: "error 13", "nvmlDeviceGetCurrentClocksThrottleReasons": 8}
    with answering(older), PerfMonitor() as watch:
        pass
    assert watch.card.disturbance == "GPU 0 held its clocks down (hardware slowdown)"


def test_clocks_and_limits_that_were_set_are_described(answering):
    answers = {"nvmlDeviceGetApplicationsClock": 800, "nvmlDeviceGetEnforcedPowerLimit": 400_000}
    with answering(answers):
        found, lines = device.describe("cuda"), watched().lines()
    assert (found.clocks, found.power_limit_w) == ("application clock 800 MHz", 400)
    assert "  power limit 400 W; by default 500 W" in lines


def test_recorded_calls_wait_for_the_gpu_on_request_and_the_sampler_reads_it():
    monitor = CallMonitor()
    model, x = torch.nn.Linear(8, 8).cuda().eval(), torch.randn(2, 8, device="cuda")
    with monitor.sampling(every_s=60), GraphRunner(model, x, batch_sizes=(2,)) as run:
        with monitor.measure("decode", synchronize=True):
            run(x)
            done = torch.cuda.current_stream().record_event()
        assert done.query()
    assert monitor.records()[0].is_synchronized
    assert monitor.summary()["decode"].graph_hit_ratio == 1.0
    assert "cudagraph_gpu_power_watts" in monitor.openmetrics()
