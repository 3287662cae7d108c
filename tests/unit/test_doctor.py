"""``pytest-cudagraph doctor``: what it says of a machine, and when it calls one unfit."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pynvml
import pytest
from tests.facts import CPU, EMULATED, timing

import pytest_cudagraph
from pytest_cudagraph import backends
from pytest_cudagraph import device as cuda_device
from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.cli import doctor, main
from pytest_cudagraph.measure import PerfCounterClock
from pytest_cudagraph.monitor import GpuCard, GpuSample, HostSample, PerfCard
from pytest_cudagraph.pipeline import noise_floor
from pytest_cudagraph.pipeline.noise_floor import NoiseFloor
from pytest_cudagraph.stats import summaries
from pytest_cudagraph.values import Interval


def floor(call_ns=20_000.0, noise_ratio=0.004, estimate=1.0, detectable_ratio=0.001):
    return NoiseFloor(
        call_ns=call_ns,
        noise_ratio=noise_ratio,
        apparent=Interval(estimate=estimate, low=estimate - 0.001, high=estimate + 0.001),
        detectable_ratio=detectable_ratio,
    )


HOST = HostSample(load_average=0.5, cpu_mhz=2300.0, rss_bytes=512 * 2**20)
CARD = PerfCard(duration_ns=2_000_000_000, host=(HOST, HOST), notes=("no GPU readings: torch sees no GPU",))


FLOORS = (floor(), floor(call_ns=2e6, noise_ratio=0.01, detectable_ratio=0.004))


@pytest.fixture
def said(capsys):
    """Run the command; gives the exit code, stdout and stderr."""

    def run(*argv):
        try:
            code = main(["doctor", *argv])
        except SystemExit as ended:
            code = ended.code
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def machine(monkeypatch):
    """A machine without a GPU whose figures are known; ``measured`` replaces what it measures."""
    choice = SimpleNamespace(kind="cpu", judged=False, reason="no GPU: this is a rehearsal on a CPU")
    device = SimpleNamespace(choose=lambda option, *, require_gpu: choice, describe=lambda kind: CPU)
    monkeypatch.setitem(sys.modules, "pytest_cudagraph.device", device)
    monkeypatch.setattr(pytest_cudagraph, "device", device, raising=False)
    monkeypatch.setattr(psutil, "getloadavg", lambda: (0.52, 1.0, 2.0))
    monkeypatch.setattr(psutil, "cpu_count", lambda: 2)
    monkeypatch.setattr(doctor, "version", lambda distribution: "9.8.7")

    def absent():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    def measured(card=CARD, floors=FLOORS):
        monkeypatch.setattr(doctor, "_measured", lambda option, budget_s: (card, list(floors)))

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    monkeypatch.measured = measured
    measured()
    return monkeypatch


def test_a_fit_machine_is_told_its_health_and_its_noise_floor(said, machine, golden):
    machine.setattr(doctor.sys, "version", "3.11.2 (main)")
    code, out, _ = said()
    assert code == 0
    golden("cli/doctor.txt", out)


def test_an_unfit_machine_is_told_each_reason_and_what_to_change(said, machine, golden):
    sample = GpuSample(
        sm_clock_mhz=1200,
        temperature_c=90,
        power_w=700.0,
        memory_used_bytes=2**30,
        slowdowns=("heat (hardware)",),
        other_processes=1,
    )
    gpu = GpuCard(index=0, name="NVIDIA H200", max_sm_clock_mhz=1980, samples=(sample, sample))
    floors = (floor(estimate=1.04), floor(call_ns=2e6, noise_ratio=0.3, detectable_ratio=0.09))
    machine.setattr(doctor.sys, "version", "3.11.2 (main)")
    machine.setattr(psutil, "getloadavg", lambda: (5.5, 1.0, 2.0))
    machine.measured(PerfCard(duration_ns=2_000_000_000, host=(HOST, HOST), gpus=(gpu,)), floors)
    code, out, _ = said("--time-budget=5")
    assert code == 1
    golden("cli/doctor-unfit.txt", out)


def test_an_emulated_device_is_unfit_however_quiet_it_is(said, machine, golden):
    choice = cuda_device.Choice(kind="cuda", judged=False, reason=f"this is {cuda_device.EMULATED.found}")
    device = SimpleNamespace(
        choose=lambda option, *, require_gpu: choice,
        describe=lambda kind: EMULATED,
        EMULATED=cuda_device.EMULATED,
    )
    machine.setitem(sys.modules, "pytest_cudagraph.device", device)
    machine.setattr(pytest_cudagraph, "device", device)
    machine.setattr(doctor.sys, "version", "3.11.2 (main)")
    code, out, _ = said()
    assert code == 1
    golden("cli/doctor-emulated.txt", out)


@pytest.mark.parametrize(("detectable_ratio", "told", "expected"), [(0.0454, "5.0 %", 0), (0.0456, "5.1 %", 1)])
def test_what_is_shown_is_what_makes_a_machine_unfit(said, machine, detectable_ratio, told, expected):
    machine.measured(floors=[floor(detectable_ratio=detectable_ratio)])
    code, out, _ = said()
    assert (code, told in out, "unfit: smallest detectable regression" in out) == (expected, True, expected == 1)


def test_too_few_calls_for_a_floor_make_a_machine_unfit(said, machine):
    machine.measured(floors=[floor(noise_ratio=math.inf, detectable_ratio=math.inf)])
    code, out, _ = said()
    assert code == 1
    assert "unfit: smallest detectable regression of calls of 20.0 µs: too few calls;" in out


@pytest.mark.parametrize("budget", ["0", "-1", "inf", "nan", "soon", "1e300", "86401"])
def test_a_budget_that_is_none_is_a_mistake_of_use(said, machine, budget):
    code, _, err = said(f"--time-budget={budget}")
    assert code == 4
    told = f"argument --time-budget: takes seconds, a number above 0, at most 86400; found {budget!r}"
    assert told in err.splitlines()[0]


def test_nvml_is_found(said, machine):
    machine.setattr(pynvml, "nvmlInit", lambda: None)
    machine.setattr(pynvml, "nvmlShutdown", lambda: None)
    machine.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "580.159")
    machine.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
    assert "nvml: driver 580.159, 2 GPUs\n" in said()[1]


@pytest.mark.parametrize("question", ["nvmlSystemGetDriverVersion", "nvmlDeviceGetCount", "nvmlShutdown"])
def test_nvml_that_starts_and_does_not_answer_ends_no_examination(said, machine, question):
    def refuse():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    answers = {"nvmlInit": None, "nvmlShutdown": None, "nvmlSystemGetDriverVersion": "580.159", "nvmlDeviceGetCount": 2}
    for name, answer in answers.items():
        machine.setattr(pynvml, name, refuse if name == question else lambda answer=answer: answer)
    code, out, _ = said()
    told = "driver 580.159, 2 GPUs" if question == "nvmlShutdown" else "not usable (GPU is lost)"
    assert (code, f"nvml: {told}\n" in out) == (0, True)


def test_the_device_that_was_chosen_is_measured_while_it_is_watched(monkeypatch):
    opened, budgets = [], []

    def floors(backend, clock, *, budget_s):
        budgets.append(budget_s)
        return [backend]

    monkeypatch.setattr(cuda_device, "choose", lambda option, *, require_gpu: SimpleNamespace(kind=option))
    monkeypatch.setattr(backends, "open_backend", lambda kind: opened.append(kind) or f"backend of {kind}")
    monkeypatch.setattr(noise_floor, "noise_floors", floors)
    card, found = doctor._measured("cuda", 5.0)
    assert (opened, found, budgets) == (["cuda"], ["backend of cuda"], [5.0])
    assert len(card.host) == 2


def test_without_torch_it_says_so(said, machine):
    machine.delattr(pytest_cudagraph, "device")
    machine.setitem(sys.modules, "pytest_cudagraph.device", None)
    code, out, err = said()
    assert (code, out) == (4, "")
    assert err.startswith("pytest-cudagraph: torch cannot be imported: ")


def test_a_device_that_is_not_there_is_a_mistake_of_use(said):
    code, out, err = said("--device=cuda")
    assert (code, out) == (4, "")
    assert err.startswith("pytest-cudagraph: the device cuda was requested, and no GPU can be used\n")


def test_a_version_that_is_not_installed_is_said():
    assert doctor.version("no-such-distribution-here") == "not installed"


def test_a_floor_is_as_wide_as_the_noise_that_was_measured():
    found = noise_floor._floor(replace(timing(), noise_ratio=0.02, blocks=100, measure_ns=10**9), budget_s=1)
    assert found.noise_ratio == 0.02
    assert found.detectable_ratio == summaries.detectable_ratio(0.02, 100)


def test_a_larger_budget_sees_smaller_regressions():
    measured = replace(timing(), noise_ratio=0.02, blocks=100, measure_ns=10**9)
    small, large = noise_floor._floor(measured, budget_s=1), noise_floor._floor(measured, budget_s=16)
    assert large.detectable_ratio == pytest.approx(small.detectable_ratio / 4)


def test_a_handful_of_blocks_tells_no_floor():
    found = noise_floor._floor(replace(timing(), noise_ratio=0.0, blocks=2), budget_s=1)
    assert (found.noise_ratio, found.detectable_ratio) == (math.inf, math.inf)


def test_equals_are_measured_for_calls_of_several_lengths(monkeypatch):
    monkeypatch.setattr(noise_floor, "_SECONDS", 0.01)
    found = noise_floor.noise_floors(open_backend("cpu"), PerfCounterClock(), budget_s=10)
    assert len(found) == 3
    assert all(each.call_ns > 0 for each in found)
