"""A replay of the CPU twin runs no Python of the model, and a proving replay shows it."""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from pytest_cudagraph import CudagraphError
from pytest_cudagraph.backends.cpu import CpuBackend

# torch says, once per process, that an operator of its own is overridden: that is the point here.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

INNER = nn.Linear(2, 2)
CALLS = []


def capture(twin, model):
    return twin.capture(model, (torch.ones(2, 2),), {}, batch_size=2)


def function(x, y):
    CALLS.append("function")
    return x + y


class Kernel(nn.Module):
    def forward(self, x, y):
        CALLS.append("module")
        return x + y


def plain_module(x, y):
    return INNER(x)


def writer(x, y, *, out):
    CALLS.append("writer")
    return out.fill_(1)


@contextmanager
def atan2_by(kernel, name="atan2"):
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl(name, kernel, "CPU")
        yield


@pytest.mark.parametrize(
    ("kernel", "name"),
    [(function, "function"), (Kernel(), "_wrapped_call_impl"), (plain_module, "plain_module")],
    ids=["a function", "a module", "a function that calls a module of torch"],
)
def test_python_below_an_operator_of_torch_stops_the_replay_before_it_runs(twin, kernel, name):
    with atan2_by(kernel):
        graph = capture(twin, lambda x: torch.atan2(x, x) * 2)
        CALLS.clear()
        with pytest.raises(CudagraphError) as caught:
            graph.replay()
    assert CALLS == []
    first, remedy = str(caught.value).splitlines()
    assert first.startswith(f"a replay must not run Python code of the model; this one called {name} at ")
    assert first.endswith(": a PyTorch operator has a kernel written in Python")
    assert remedy == (
        "register the function as a custom operator (torch.library.custom_op), which is one step of the graph"
    )
    assert sys.getprofile() is None
    assert gc.isenabled()
    assert graph.replays == 0


def test_a_graph_is_checked_again_whenever_it_has_been_poisoned(twin):
    graph = capture(twin, lambda x: torch.atan2(x, x) * 2)
    graph.replay()
    with atan2_by(writer, "atan2.out"):
        CALLS.clear()
        graph.replay()
        assert CALLS == ["writer"]
        graph.poison()
        with pytest.raises(CudagraphError, match=r"called writer at .*: a PyTorch operator"):
            graph.replay()
        assert CALLS == ["writer"]


def test_a_custom_operator_has_its_own_python(twin):
    with torch.library._scoped_library("twin", "FRAGMENT") as library:
        library.define("doubled(Tensor x) -> Tensor")
        library.impl("doubled", lambda x: function(x, x), "CPU")
        graph = capture(twin, lambda x: torch.ops.twin.doubled(x) + 1)
        CALLS.clear()
        assert graph.replay().eq(3).all()
        assert CALLS == ["function"]


def test_a_compiled_region_has_its_own_python(twin):
    region = CpuBackend().region(lambda x: function(x, x), "region")
    graph = capture(twin, lambda x: region(x) + 1)
    CALLS.clear()
    assert graph.replay().eq(3).all()
    assert CALLS == ["function"]


def test_where_a_profiler_runs_the_replay_is_left_to_it(twin):
    seen = []

    def profiler(frame, event, arg):
        seen.append(event)

    with atan2_by(function):
        graph = capture(twin, lambda x: torch.atan2(x, x) * 2)
        sys.setprofile(profiler)
        try:
            graph.replay()
            assert sys.getprofile() is profiler
        finally:
            sys.setprofile(None)
    assert seen


def test_what_the_garbage_collector_calls_is_not_the_models_doing(twin):
    graph = capture(twin, lambda x: torch.atan2(x, x) * 2)
    deleted = []

    class Loop:
        def __init__(self):
            self.itself = self

        def __del__(self):
            deleted.append(1)

    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for _ in range(20):
            Loop()
            graph.poison()
            graph.replay()
    finally:
        gc.set_threshold(*thresholds)
    assert deleted
