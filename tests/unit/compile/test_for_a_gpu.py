"""What a package for a GPU is asked, keyed and loaded by; no GPU and no compiler is needed to see it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pytest_cudagraph.compile import aot, cache
from pytest_cudagraph.errors import CudagraphError


class Loader:
    def boxed_run(self, tensors):
        return ["boxed", *tensors]

    def run(self, tensors):
        return ["plain", *tensors]


@pytest.fixture
def loaded(monkeypatch):
    """What ``aoti_load_package`` was asked for, by keyword."""
    asked = []

    def aoti_load_package(path, run_single_threaded=False, device_index=-1):
        asked.append({"path": path, "run_single_threaded": run_single_threaded, "device_index": device_index})
        return SimpleNamespace(loader=Loader())

    monkeypatch.setattr(torch._inductor, "aoti_load_package", aoti_load_package)
    return asked


@pytest.mark.parametrize(("device", "index"), [("cuda:1", 1), ("cuda:0", 0), ("cuda", -1), ("cpu", -1)])
def test_a_package_is_loaded_on_the_gpu_of_the_run_and_without_threads_of_its_own(loaded, device, index):
    aot.load(Path("package.pt2"), device)
    assert loaded == [{"path": "package.pt2", "run_single_threaded": True, "device_index": index}]


def test_a_package_is_called_by_the_entry_that_parses_nothing(loaded, monkeypatch):
    assert aot.load(Path("package.pt2"), "cuda:0")([1]) == ["boxed", 1]
    monkeypatch.delattr(Loader, "boxed_run")
    assert aot.load(Path("package.pt2"), "cuda:0")([1]) == ["plain", 1]


def test_an_older_torch_is_asked_for_what_it_knows_only(monkeypatch):
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path: SimpleNamespace(loader=Loader()))
    assert aot.load(Path("package.pt2"), "cpu")([1]) == ["boxed", 1]


def test_a_torch_whose_packages_keep_their_threads_is_refused_on_a_gpu_alone(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.6.0")
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path: None)
    with pytest.raises(CudagraphError) as raised:
        aot.require_capturable(SimpleNamespace(kind="cuda"))
    assert str(raised.value) == (
        "compile='aot' on CUDA needs torch 2.7 or newer, found 2.6.0: its packages synchronize threads, "
        "which a capture refuses\n  to fix: install a newer torch, or use compile='inductor'"
    )
    aot.require_capturable(SimpleNamespace(kind="cpu"))


def test_a_torch_that_can_load_without_threads_may_package_for_a_gpu(loaded):
    aot.require_capturable(SimpleNamespace(kind="cuda"))
    assert loaded == []


def test_a_package_of_one_gpu_is_not_taken_for_one_of_another(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "get_device_name", lambda device: {"cuda:0": "NVIDIA H200"}.get(device, "NVIDIA T4")
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0) if device == "cuda:0" else (7, 5))
    texts = [cache.machine_text(device) for device in ("cpu", "cuda:0", "cuda:1")]
    assert len(set(texts)) == 3
    assert texts[0].splitlines()[1] == "cpu cpu"
    assert texts[1].splitlines()[1] == "cuda:0 NVIDIA H200 (9, 0)"
    assert texts[2].splitlines()[1] == "cuda:1 NVIDIA T4 (7, 5)"
