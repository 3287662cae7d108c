"""The GPU of a run without workers is its own, or its speed is not judged."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pytest_cudagraph import gpu_locks, pipeline
from pytest_cudagraph.gpu_locks import VisibleGpu
from pytest_cudagraph.session import devices
from pytest_cudagraph.session.devices import open_once
from pytest_cudagraph.session.state_keys import DEVICE_CONTEXTS, SETTINGS
from pytest_cudagraph.settings.options import Settings
from pytest_cudagraph.settings.registered import OPTIONS

GPUS = [VisibleGpu(uuid="GPU-aaaa0001", name="NVIDIA H200"), VisibleGpu(uuid="GPU-bbbb0002", name="NVIDIA H200")]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A session on two GPUs whose devices are opened without one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(devices, "_WAIT_S", 0.0)
    monkeypatch.setattr(gpu_locks, "visible_gpus", lambda: GPUS)

    def opened(option, settings, make=None):
        kind = "cpu" if option == "cpu" else "cuda"
        return SimpleNamespace(device=SimpleNamespace(kind=kind), why_not_judged=settings.why_shared)

    monkeypatch.setattr(pipeline, "open_device_context", opened)
    cleanups = []
    config = SimpleNamespace(
        stash={SETTINGS: Settings(**{option.setting: option.default for option in OPTIONS}), DEVICE_CONTEXTS: {}},
        hook=SimpleNamespace(pytest_cudagraph_backends=lambda config: []),
        getoption=lambda name, default: default,
        pluginmanager=SimpleNamespace(get_plugin=lambda name: None),
        add_cleanup=cleanups.append,
    )
    yield config
    for cleanup in cleanups:
        cleanup()


def test_a_run_takes_its_gpu_once_for_all_of_its_devices(run):
    assert [open_once(run, option).why_not_judged for option in ("auto", "cuda", "cpu")] == ["", "", ""]
    assert gpu_locks.take(GPUS[:1], 1, wait_s=0, on_wait=pytest.fail) is None
    gpu_locks.take(GPUS[1:], 1, wait_s=0, on_wait=pytest.fail).release()


def test_speed_is_not_judged_on_a_gpu_that_another_run_holds(run):
    other = gpu_locks.take(GPUS[:1], 1, wait_s=0, on_wait=pytest.fail)
    assert open_once(run, "cuda").why_not_judged.startswith("other runs held the GPUs")
    assert open_once(run, "cpu").why_not_judged == ""
    other.release()


def test_a_folder_that_cannot_be_written_stops_nothing(run, tmp_path):
    (tmp_path / "pytest-cudagraph").write_text("", encoding="utf-8")
    assert open_once(run, "cuda").why_not_judged == ""
