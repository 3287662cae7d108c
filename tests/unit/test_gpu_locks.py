"""Which GPUs a run may use, as CUDA would say, and that two runs never have the same one."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from tests.facts import report

from pytest_cudagraph import gpu_locks
from pytest_cudagraph.gpu_locks import VisibleGpu, measured_on, take, visible_gpus

A, B, C, PART_1, PART_2 = "GPU-aaaa0001-1", "GPU-aabb0002-2", "GPU-cccc0003-3", "MIG-dddd0004-4", "MIG-eeee0005-5"
H200, SLICE = "NVIDIA H200", "NVIDIA H200 MIG 1g.18gb"


class ThreeGpus:
    """``pynvml`` with three GPUs. The last is divided into two parts if ``is_divided``."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, is_divided=False):
        self.is_divided = is_divided

    def nvmlInit(self):
        pass

    def nvmlShutdown(self):
        pass

    def nvmlDeviceGetCount(self):
        return 3

    def nvmlDeviceGetHandleByIndex(self, index):
        return (A, B, C)[index]

    def nvmlDeviceGetUUID(self, handle):
        return handle

    def nvmlDeviceGetName(self, handle):
        return SLICE if handle.startswith("MIG") else H200

    def nvmlDeviceGetMigMode(self, handle):
        if handle == A:
            raise self.NVMLError("Not Supported")
        return [int(self.is_divided and handle == C)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, index):
        if index > 1:
            raise self.NVMLError("Not Found")
        return (PART_1, PART_2)[index]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "pytest-cudagraph" / "gpus"


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, [A, B, C]),
        ("1", [B]),
        ("2,0", [C, A]),
        (f"{B},{A}", [B, A]),
        ("GPU-cc", [C]),
        ("GPU-aa,2", []),  # two GPUs begin so
        ("0,-1,1", [A]),
        ("0,0,1", [A]),
        ("", []),
    ],
)
def test_the_gpus_are_those_that_cuda_sees(monkeypatch, visible, found):
    monkeypatch.setitem(sys.modules, "pynvml", ThreeGpus())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.uuid for gpu in visible_gpus()] == found


@pytest.mark.parametrize(("visible", "found"), [(None, [A, B, PART_1, PART_2]), ("2", [PART_1]), ("MIG-ee", [PART_2])])
def test_the_parts_of_a_divided_gpu_count_as_gpus(monkeypatch, visible, found):
    monkeypatch.setitem(sys.modules, "pynvml", ThreeGpus(is_divided=True))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus = visible_gpus()
    assert [gpu.uuid for gpu in gpus] == found
    assert str(gpus[-1]) == f"{SLICE}, {found[-1][:12]}"


def test_without_a_driver_there_are_no_gpus(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert visible_gpus() == []


GPUS = [VisibleGpu(uuid=uuid, name=H200) for uuid in (A, B, C)]


def test_runs_take_other_gpus_and_all_or_none(folder):
    first = take(GPUS, 2, wait_s=0, on_wait=pytest.fail)
    second = take(GPUS, 1, wait_s=0, on_wait=pytest.fail)
    assert ([gpu.uuid for gpu in first.gpus], [gpu.uuid for gpu in second.gpus]) == ([A, B], [C])
    second.release()
    assert take(GPUS, 2, wait_s=0, on_wait=pytest.fail) is None
    # What was free is free again.
    assert [gpu.uuid for gpu in take(GPUS, 1, wait_s=0, on_wait=pytest.fail).gpus] == [C]
    assert sorted(path.name for path in folder.iterdir()) == [f"{uuid}.lock" for uuid in (A, B, C)]


def test_a_run_waits_until_another_has_ended(monkeypatch):
    other = take(GPUS, 3, wait_s=0, on_wait=pytest.fail)
    said = []
    monkeypatch.setattr(gpu_locks.time, "sleep", lambda seconds: other.release())
    taken = take(GPUS, 3, wait_s=60, on_wait=lambda: said.append("waits"))
    assert (len(taken.gpus), said) == (3, ["waits"])


def test_the_summary_says_which_gpu_measured_what():
    names = [f"test_a.py::test_{number}" for number in range(7)]
    reports = [replace(report(name), gpu=A if name < "test_a.py::test_6" else B) for name in names]
    assert measured_on([*reports, report("test_b.py::test_elsewhere")]) == [
        f"GPU-aaaa0001 measured {', '.join(names[:5])} and 1 more",
        f"GPU-aabb0002 measured {names[6]}",
    ]
