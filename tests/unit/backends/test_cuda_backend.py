"""The CUDA backend without captures: devices, streams, regions, events, random states, the running mode."""

import pytest
import torch
from tests.fake_cuda import FakeStream

from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.backends.cuda import CudaBackend


def test_the_device_is_the_current_gpu_unless_one_is_named(cuda):
    assert CudaBackend(cuda=cuda).device == "cuda:0"
    assert CudaBackend(3, cuda=cuda).device == "cuda:3"
    assert CudaBackend(cuda=cuda).kind == "cuda"


def test_a_backend_is_opened_by_its_kind(monkeypatch):
    opened = []
    monkeypatch.setattr("pytest_cudagraph.backends.cuda.CudaBackend", lambda: opened.append("cuda"))
    open_backend("cuda")
    assert opened == ["cuda"]
    assert open_backend("cpu").kind == "cpu"
    with pytest.raises(ValueError, match=r"^a backend is 'cuda' or 'cpu', not 'tpu'$"):
        open_backend("tpu")


def test_the_current_stream_waits_for_an_earlier_one_only_if_that_is_another(backend, cuda):
    current = backend.order_after(None)
    assert backend.order_after(current) is current is cuda.stream_now
    assert cuda.calls == []
    assert backend.order_after(FakeStream(cuda, "earlier")) is current
    assert cuda.calls == ["wait_stream caller after earlier"]


def test_running_is_inference_mode(backend):
    with backend.running():
        assert torch.is_inference_mode_enabled()
    assert not torch.is_inference_mode_enabled()


def test_synchronize_waits_for_this_gpu(backend, cuda):
    backend.synchronize()
    assert cuda.calls == ["synchronize"]


def test_a_region_counts_eager_calls_and_recordings_but_no_replays(backend):
    region = backend.region(lambda x: x + 1, "block")
    region(torch.ones(2))
    assert region.executions == 1
    graph = backend.pool().capture(region, (torch.ones(2),), {}, batch_size=2)
    assert region.executions == 5
    graph.replay()
    assert (region.executions, region.label) == (5, "block")


def test_a_region_that_raises_has_not_run(backend):
    def broken():
        raise ValueError("broken")

    region = backend.region(broken, "block")
    with pytest.raises(ValueError, match="broken"):
        region()
    assert region.executions == 0


def test_the_event_timer_gives_nanoseconds_between_two_events(backend, cuda):
    assert backend.event_timer().time_ns(lambda: cuda.note("call")) == 250_000.0
    assert cuda.calls == ["record", "call", "record", "event_synchronize"]


def test_random_states_of_cpu_and_gpu_are_saved_and_put_back(backend, cuda):
    state = backend.rng_state()
    drawn = torch.rand(3)
    backend.set_rng_state(state)
    assert torch.equal(torch.rand(3), drawn)
    assert cuda.calls == ["set_rng_state [1, 2, 3]"]
