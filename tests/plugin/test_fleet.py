"""Each xdist worker has a GPU for itself, and no other run of this user has it. The driver is fake, xdist is real."""

from __future__ import annotations

import pytest

from pytest_cudagraph.gpu_locks import VisibleGpu, take

NVML = """
class NVMLError(Exception):
    pass

def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return 3
def nvmlDeviceGetHandleByIndex(index): return f"GPU-{index}{index}{index}{index}0000-1"
def nvmlDeviceGetUUID(handle): return handle
def nvmlDeviceGetName(handle): return "NVIDIA L4" if handle.startswith("GPU-1") else "NVIDIA H200"
def nvmlDeviceGetMigMode(handle): raise NVMLError("Not Supported")
"""
FIRST, OTHER_MODEL, LAST = (f"GPU-{index * 4}0000-1" for index in "012")
# Conftests ask torch for its devices, and CUDA reads the variable then.
CONFTEST = "import os; VISIBLE = os.environ.get('CUDA_VISIBLE_DEVICES')"
TESTS = """
import conftest, pytest

@pytest.mark.parametrize("number", range(4))
def test_sees(number):
    print(f"sees {conftest.VISIBLE}")
"""


@pytest.fixture
def run(pytester, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(pytester.path / "cache"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    pytester.makepyfile(pynvml=NVML, test_user=TESTS)
    pytester.makeconftest(CONFTEST)
    return lambda *options: pytester.runpytest_subprocess("-p", "no:benchmark", "--cudagraph", "-rP", *options)


def seen(result):
    return {line.removeprefix("sees ") for line in result.outlines if line.startswith("sees ")}


@pytest.mark.contract
def test_each_worker_sees_its_own_gpu_of_one_model(run):
    result = run("-n", "2")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(
        [
            f"cudagraph: gw0 measures on NVIDIA H200, {FIRST[:12]}",
            f"cudagraph: gw1 measures on NVIDIA H200, {LAST[:12]}",
        ]
    )
    assert seen(result) == {FIRST, LAST}


@pytest.mark.contract
def test_a_gpu_of_another_run_is_not_taken(run):
    other = take([VisibleGpu(uuid=FIRST, name="NVIDIA H200")], 1, wait_s=0, on_wait=pytest.fail)
    assert seen(run("-n", "1")) == {LAST}
    other.release()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("-n", "2"), "cudagraph: 2 xdist workers share 1 GPU; run with -n 1 to judge speed"),
        (("-n", "1", "--cudagraph-device=cpu"), "created: 1/1 worker"),
    ],
    ids=["more workers than GPUs", "the CPU"],
)
def test_no_gpu_is_taken_for(run, monkeypatch, options, said):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    result = run(*options)
    result.stdout.fnmatch_lines([said])
    assert seen(result) == {"2"}
