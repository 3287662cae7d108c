"""The device of a run, and the message when there is none."""

import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from tests.fake_nvml import UUID, FakeNvml

from pytest_cudagraph import device, environment
from pytest_cudagraph.device import Choice, choose, describe
from pytest_cudagraph.errors import DeviceUnavailable

REASON_BY_NAME = "the CPU was requested: its latencies are judged"


@pytest.fixture
def machine(monkeypatch):
    """A torch with CUDA, and what it finds on the machine."""

    def set_up(*, available, nvml, warning="", visible=None, first_operation=None, gpus=("NVIDIA H200",), uuid=UUID):
        def is_available():
            if warning:
                warnings.warn(warning, stacklevel=2)
            return available

        def ones(*shape, device):
            if first_operation:
                raise first_operation
            return torch.zeros(shape)

        monkeypatch.setattr(torch.version, "cuda", "12.8")
        monkeypatch.setattr(torch.cuda, "is_available", is_available)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: len(gpus) - 1)
        known = {"uuid": uuid} if uuid else {}  # some builds of torch have none
        properties = [SimpleNamespace(name=name, **known) for name in gpus]
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])
        monkeypatch.setattr(torch, "ones", ones)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return set_up


@pytest.fixture
def no_cuda_build(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize("option", ["auto", "cuda"])
def test_a_usable_gpu_is_chosen_and_judged(machine, option):
    machine(available=True, nvml=FakeNvml())
    assert choose(option, require_gpu=True) == Choice(kind="cuda", judged=True, reason="a GPU is available")


def test_the_cpu_by_name_is_judged_without_looking_for_a_gpu(monkeypatch):
    monkeypatch.setattr(device, "why_no_gpu", lambda: pytest.fail("no GPU was requested"))
    assert choose("cpu", require_gpu=False) == Choice(kind="cpu", judged=True, reason=REASON_BY_NAME)


def test_the_cpu_by_name_passes_a_required_gpu_only_if_there_is_one(machine):
    machine(available=True, nvml=FakeNvml())
    assert choose("cpu", require_gpu=True).kind == "cpu"
    machine(available=False, nvml=FakeNvml(0))
    with pytest.raises(DeviceUnavailable):
        choose("cpu", require_gpu=True)


def test_auto_without_a_gpu_is_a_rehearsal_with_its_reason(no_cuda_build):
    assert choose("auto", require_gpu=False) == Choice(
        kind="cpu", judged=False, reason="rehearsal on the CPU: torch 2.13.0+cpu is built without CUDA"
    )


def test_a_device_nobody_knows_is_refused():
    with pytest.raises(DeviceUnavailable) as raised:
        choose("tpu", require_gpu=False)
    assert str(raised.value) == "there is no device 'tpu'; devices are auto, cuda and cpu"


def test_cuda_without_a_cuda_build_names_the_build_and_the_remedy(no_cuda_build):
    with pytest.raises(DeviceUnavailable) as raised:
        choose("cuda", require_gpu=False)
    assert str(raised.value) == (
        "the device cuda was requested, and no GPU can be used\n"
        "found: torch 2.13.0+cpu is built without CUDA; CUDA_VISIBLE_DEVICES is not set\n"
        "install a CUDA build of torch (https://pytorch.org/get-started/locally); "
        "or use --cudagraph-device=auto, which falls back to the CPU"
    )


def test_a_required_gpu_is_asked_for_by_its_flag(no_cuda_build, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(DeviceUnavailable) as raised:
        choose("auto", require_gpu=True)
    assert str(raised.value).splitlines()[:2] == [
        "--cudagraph-require-gpu requires a GPU, and no GPU can be used",
        "found: torch 2.13.0+cpu is built without CUDA; CUDA_VISIBLE_DEVICES='0'",
    ]


@pytest.mark.parametrize(
    ("found", "facts"),
    [
        ("the NVIDIA driver does not respond (nvmlInit fails)", {"nvml": FakeNvml(failing=["nvmlInit"])}),
        ("the driver finds no GPU", {"nvml": FakeNvml(0)}),
        ("the driver finds no GPU", {"nvml": FakeNvml(2, failing=["nvmlDeviceGetCount"])}),
        (
            "the driver finds 2 GPUs, but CUDA_VISIBLE_DEVICES='' hides them from torch",
            {"nvml": FakeNvml(2), "visible": ""},
        ),
        (
            "the driver finds 1 GPU, but torch finds none: CUDA initialization: driver too old",
            {
                "nvml": FakeNvml(1),
                "warning": "CUDA initialization: driver too old (Triggered internally)\nmore",
            },
        ),
        ("the driver finds 1 GPU, but torch finds none: it gives no reason", {"nvml": FakeNvml(1)}),
    ],
)
def test_an_invisible_gpu_is_explained(machine, found, facts):
    machine(available=False, **facts)
    assert choose("auto", require_gpu=False).reason == f"rehearsal on the CPU: {found}"
    assert facts["nvml"].open == 0


def test_a_machine_without_pynvml_still_gets_its_answer(machine):
    machine(available=False, nvml=None)
    assert choose("auto", require_gpu=False).reason.startswith(
        "rehearsal on the CPU: the NVIDIA driver does not respond ("
    )


def test_a_gpu_that_fails_at_its_first_operation_is_not_usable(machine):
    error = RuntimeError("CUDA error: no kernel image is available for execution on the device\nadvice")
    machine(available=True, nvml=FakeNvml(), first_operation=error)
    with pytest.raises(DeviceUnavailable) as raised:
        choose("cuda", require_gpu=False)
    assert "its first operation failed: CUDA error: no kernel image is available" in str(raised.value)
    assert "advice" not in str(raised.value)


def test_a_gpu_that_fails_when_torch_starts_it_is_not_usable_either(machine):
    # What was asked of CUDA before it was there (a seed) runs with the first operation; its failure is no RuntimeError.
    error = torch.cuda.DeferredCudaCallError("CUDA call failed lazily at initialization with error: assert\n\nadvice")
    machine(available=True, nvml=FakeNvml(), first_operation=error)
    assert choose("auto", require_gpu=False).reason == (
        "rehearsal on the CPU: a GPU is visible, but its first operation failed: "
        "CUDA call failed lazily at initialization with error: assert"
    )


EMULATED_NAME = "Emulated CUDA device (host memory)"


@pytest.mark.parametrize("option", ["auto", "cuda"])
def test_an_emulated_device_runs_graphs_and_no_speed_is_judged(machine, option):
    machine(available=True, nvml=FakeNvml(), gpus=["NVIDIA H200", EMULATED_NAME])
    assert choose(option) == Choice(
        kind="cuda", judged=False, reason="this is an emulated CUDA device, which is no GPU"
    )


@pytest.mark.parametrize("option", ["auto", "cuda", "cpu"])
def test_an_emulated_device_is_not_the_gpu_that_was_required(machine, option):
    machine(available=True, nvml=FakeNvml(), gpus=[EMULATED_NAME])
    with pytest.raises(DeviceUnavailable) as raised:
        choose(option, require_gpu=True)
    assert str(raised.value) == (
        "--cudagraph-require-gpu requires a GPU, and no GPU can be used\n"
        "found: an emulated CUDA device, which is no GPU; CUDA_VISIBLE_DEVICES is not set\n"
        "use an environment without the emulated device, on a machine with a GPU; "
        "or leave out --cudagraph-require-gpu: speed is then not judged"
    )


def test_a_cpu_beside_a_gpu_has_no_driver_and_no_cuda(machine):
    machine(available=True, nvml=FakeNvml())
    found = describe("cpu")
    assert (found.driver, found.cuda, found.power_limit_w) == (None, None, None)


def test_the_cpu_is_described_by_the_hosts_facts():
    found = describe("cpu")
    assert (found.kind, found.name) == ("cpu", environment.host_cpu_name())
    assert (found.mig, found.power_limit_w, found.clocks) == (None, None, None)
    assert (found.driver, found.cuda) == (None, None)
    assert (found.torch, found.threads) == (torch.__version__, torch.get_num_threads())


@pytest.mark.parametrize(
    ("failing", "driver"), [((), "580.159"), (["nvmlInit"], None), (["nvmlSystemGetDriverVersion"], None)]
)
def test_a_gpu_is_described_with_its_driver_where_nvml_tells(machine, failing, driver):
    machine(available=True, nvml=FakeNvml(failing=failing), uuid=None)
    found = describe("cuda")
    assert (found.name, found.driver, found.cuda, found.power_limit_w) == ("NVIDIA H200", driver, "12.8", None)
    assert found.host_cpu == environment.host_cpu_name()


@pytest.mark.parametrize(
    ("of_torch", "of_nvml"),
    [("12ab", "GPU-12ab"), ("12ab", "MIG-12ab"), ("GPU-12ab", "GPU-12ab"), ("MIG-12ab", "MIG-12ab")],
)
def test_a_gpu_and_a_slice_of_one_are_found_by_their_uuid(machine, of_torch, of_nvml):
    machine(available=True, nvml=FakeNvml(uuid=of_nvml), uuid=of_torch)
    assert describe("cuda").power_limit_w == 500


def test_the_gpu_that_is_described_is_the_current_one(machine):
    machine(available=True, nvml=FakeNvml(), gpus=["NVIDIA T4", "NVIDIA H200"])
    assert describe("cuda").name == "NVIDIA H200"


def test_nvml_that_does_not_shut_down_costs_a_run_nothing(machine):
    machine(available=True, nvml=FakeNvml(failing=["nvmlShutdown"]))
    found = describe("cuda")
    assert (found.driver, found.power_limit_w) == ("580.159", 500)
    machine(available=False, nvml=FakeNvml(0, failing=["nvmlShutdown"]))
    assert choose("auto", require_gpu=False).reason == "rehearsal on the CPU: the driver finds no GPU"


@pytest.mark.parametrize(
    ("nvml", "name", "expected"),
    [
        ({}, "NVIDIA H200", (None, 500, "default clocks")),
        ({"clock_mhz": 1500}, "NVIDIA H200", (None, 500, "application clock 1500 MHz")),
        ({}, "NVIDIA H200 MIG 1g.18gb", ("1g.18gb", 500, "default clocks")),
        ({"failing": ["nvmlDeviceGetEnforcedPowerLimit"]}, "NVIDIA H200", (None, None, "default clocks")),
        ({"failing": ["nvmlDeviceGetApplicationsClock"]}, "NVIDIA H200", (None, 500, None)),
        ({"failing": ["nvmlDeviceGetHandleByUUID"]}, "NVIDIA H200", (None, None, None)),
        ({"failing": ["nvmlInit"]}, "NVIDIA H200", (None, None, None)),
    ],
)
def test_what_decides_a_gpus_speed_is_described(machine, nvml, name, expected):
    fake = FakeNvml(**nvml)
    machine(available=True, nvml=fake, gpus=[name])
    found = describe("cuda")
    assert (found.mig, found.power_limit_w, found.clocks) == expected
    assert fake.open == 0
