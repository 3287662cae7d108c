"""A runner inside of a call that is captured: the outer graph holds the layer's own operations."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from tests.fake_cuda import FakeCuda
from torch import nn

from pytest_cudagraph import CudagraphError, GraphRunner, IntegratedAOTCompiler
from pytest_cudagraph.backends.capture_mode import is_capturing
from pytest_cudagraph.backends.cpu import CpuBackend
from pytest_cudagraph.backends.cuda import CudaBackend

LONG_S = 30.0
"""After that two threads are taken to wait for each other."""


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x).relu()


class ServedBy(nn.Module):
    """Has a layer that something else serves."""

    def __init__(self, layer):
        super().__init__()
        self.head = nn.Linear(3, 2)
        self.layer = [layer]

    def forward(self, x):
        return self.head(self.layer[0](x))


def eager(outer, layer, x):
    with torch.inference_mode():
        return outer.head(layer(x))


@pytest.fixture
def layer():
    return Layer().eval()


@pytest.fixture
def x():
    return torch.randn(2, 3)


def operations_of(model, x):
    with CpuBackend().pool() as pool:
        return pool.capture(model, (x,), {}, batch_size=2).receipt.operations


def test_the_outer_graph_has_the_operations_of_the_layer_alone(layer, x):
    inner = GraphRunner(layer, x, device="cpu", batch_sizes=(2, 4))
    assert operations_of(ServedBy(inner), x) == operations_of(ServedBy(layer), x)


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_answers_are_those_of_eager_with_inner_and_outer_graphs(layer, rows):
    inner = GraphRunner(layer, torch.randn(2, 3), device="cpu", batch_sizes=(2, 4), capture="lazy")
    outer = ServedBy(inner).eval()
    x = torch.randn(rows, 3)
    with GraphRunner(outer, torch.randn(2, 3), device="cpu", batch_sizes=(2, 4)) as run:
        torch.testing.assert_close(run(x), eager(outer, layer, x))


def test_a_replay_of_the_outer_graph_follows_new_weights_of_the_layer(layer, x):
    outer = ServedBy(GraphRunner(layer, x, device="cpu", batch_sizes=(2,))).eval()
    with GraphRunner(outer, x, device="cpu", batch_sizes=(2,)) as run:
        with torch.no_grad():
            layer.linear.weight.mul_(2)
        torch.testing.assert_close(run(x), eager(outer, layer, x))


def test_calls_of_a_capture_are_not_counted(layer, x):
    inner = GraphRunner(layer, x, device="cpu", batch_sizes=(2,))
    with CpuBackend().pool() as pool:
        pool.capture(ServedBy(inner), (x,), {}, batch_size=2)
    assert inner.statistics.calls == 0
    inner(x)
    assert inner.statistics.hits == 1


def test_no_graph_is_launched_inside_of_a_cuda_capture(layer, x, monkeypatch):
    monkeypatch.setattr(gc, "collect", lambda: 0)
    cuda = FakeCuda()
    backend = CudaBackend(cuda=cuda, device="cpu")
    inner = GraphRunner(layer, x, backend=backend, batch_sizes=(2,))
    cuda.calls.clear()
    backend.pool().capture(ServedBy(inner), (x,), {}, batch_size=2)
    assert "replay" not in cuda.calls


def test_a_compilers_model_steps_aside_too_and_says_so(layer, x):
    with IntegratedAOTCompiler(device="cpu", batch_sizes=(2,)) as compiler:
        served, said = compiler.compile_model_aot(layer, x, {}, "none"), []
        assert served.infer(x).path == "graph"

        def call(x):
            result = served.infer(x)
            said.append((result.path, result.reason))
            return result.output + 1

        with CpuBackend().pool() as pool:
            graph = pool.capture(call, (x,), {}, batch_size=2)
            torch.testing.assert_close(graph(x), eager_layer(layer, x) + 1)
        assert set(said) == {("eager", "inside of a capture")}
        assert sum(compiler.statistics().models[0].paths.values()) == 1


def eager_layer(layer, x):
    with torch.inference_mode():
        return layer(x)


def test_a_thread_is_capturing_from_its_first_warm_up_to_the_end_also_of_a_refused_capture(x):
    seen = []

    def model(x):
        seen.append((is_capturing(), seen_elsewhere()))
        raise ValueError("no")

    def seen_elsewhere():
        found = []
        other = threading.Thread(target=lambda: found.append(is_capturing()))
        other.start()
        other.join()
        return found[0]

    with CpuBackend().pool() as pool, pytest.raises(ValueError, match="no"):
        pool.capture(model, (x,), {}, batch_size=2)
    assert seen == [(True, False)]
    assert not is_capturing()


class _Told(CudaBackend):
    """Says when a runner holds its lock."""

    def __init__(self, cuda, entered):
        super().__init__(cuda=cuda, device="cpu")
        self.entered = entered

    def order_after(self, earlier):
        self.entered.set()
        return super().order_after(earlier)


def test_two_threads_that_capture_one_inside_of_the_other_do_not_wait_for_each_other(layer, x, monkeypatch):
    monkeypatch.setattr(gc, "collect", lambda: 0)
    cuda, inner_has_its_lock, outer_captures = FakeCuda(), threading.Event(), threading.Event()
    inner = GraphRunner(layer, x, backend=_Told(cuda, inner_has_its_lock), batch_sizes=(2,), capture="lazy")

    def model(x):
        outer_captures.set()
        assert inner_has_its_lock.wait(LONG_S)
        return inner(x)

    capture = CudaBackend(cuda=cuda, device="cpu").pool().capture

    def call_inner():
        assert outer_captures.wait(LONG_S)
        inner(x)

    threads = [
        threading.Thread(target=lambda: capture(model, (x,), {}, batch_size=2), daemon=True),
        threading.Thread(target=call_inner, daemon=True),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert [thread.is_alive() for thread in threads] == [False, False]
    assert inner.statistics.captures == 1


def test_a_closed_runner_raises_inside_of_a_capture_too(layer, x):
    inner = GraphRunner(layer, x, device="cpu", batch_sizes=(2,))
    inner.close()
    with CpuBackend().pool() as pool, pytest.raises(CudagraphError, match="this GraphRunner is closed"):
        pool.capture(ServedBy(inner), (x,), {}, batch_size=2)
