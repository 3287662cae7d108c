"""One thread reads host and GPU. It keeps a spread of each reading, however long it runs."""

import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from tests.fake_nvml import GIB, UUID, FakeNvml

from pytest_cudagraph import CallMonitor
from pytest_cudagraph.errors import InputError
from pytest_cudagraph.serving.calls.resource_sampler import GPU_READINGS, HOST_READINGS


@pytest.fixture
def nvml(monkeypatch):
    nvml = FakeNvml()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name="H200", uuid=UUID))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml


def read(monitor):
    """The readings in the monitor's export, by name and GPU."""
    return {(each.reading, each.gpu): each for each in monitor._state().resources}


def test_readings_of_host_and_gpu_are_spreads_that_end_with_the_block(nvml):
    monitor, before = CallMonitor(), threading.active_count()
    with monitor.sampling(every_s=1e-4):
        while not read(monitor):
            pass
        nvml.clock_mhz = 1200
    found = read(monitor)
    assert threading.active_count() == before
    assert nvml.open == 0
    assert {name for name, gpu in found if gpu == 0} == set(GPU_READINGS)
    assert {name for name, gpu in found if gpu is None} <= set(HOST_READINGS)
    clock = found["sm_clock_mhz", 0]
    assert (clock.minimum, clock.maximum, clock.last) == (1200, 1980, 1200)
    assert 1200 < clock.mean < 1980
    assert (found["memory_used_bytes", 0].last, found["utilization_ratio", 0].last) == (3 * GIB, 0.7)
    assert found["rss_bytes", None].last > 0
    monitor.clear()
    assert read(monitor) == {}


def test_a_gpu_that_is_lost_keeps_its_earlier_readings_and_is_a_note(nvml):
    monitor = CallMonitor()
    with monitor.sampling(every_s=1e-4) as sampler:
        while not read(monitor):
            pass
        nvml.failing = {name: "GPU is lost" for name in dir(nvml) if name.startswith("nvmlDeviceGet")}
    assert read(monitor)["power_w", 0].last == 652.3
    assert "GPU is lost" in "".join(sampler.notes)


def test_an_interval_that_is_none_is_refused():
    with pytest.raises(InputError, match=r"^every_s must be a number of seconds above 0, or None; found 0$"):
        CallMonitor().sampling(0)


def test_two_blocks_add_up(nvml):
    monitor = CallMonitor()
    with monitor.sampling(every_s=60.0):
        nvml.clock_mhz = 900
    first = read(monitor)["sm_clock_mhz", 0]
    nvml.clock_mhz = 1980
    with monitor.sampling(every_s=60.0):
        pass
    both = read(monitor)["sm_clock_mhz", 0]
    assert (first.samples, both.samples) == (1, 2)
    assert (both.minimum, both.maximum, both.last) == (900, 1980, 1980)


def test_a_sampler_in_its_own_block_is_refused_and_its_thread_ends_with_the_outer_block(nvml):
    before = threading.active_count()
    with CallMonitor().sampling(every_s=60.0) as sampler:
        with pytest.raises(InputError, match="found a block inside its own"), sampler:
            pass
    assert threading.active_count() == before
