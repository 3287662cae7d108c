"""What capturing leaves behind: graphs, largest first, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.unit.check.fakes import FakeBackend, FakeGraph
from torch import nn

from pytest_cudagraph.capture import capture_batches
from pytest_cudagraph.errors import CaptureRefusal, CudagraphError, InputError
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.values import Receipt


class FakePool:
    """Warms up by three calls and captures with a fourth, all of which leave their traces in the model."""

    def __init__(self, *, refuses=(), kernels=1, error=None):
        self.order, self.graphs = [], []
        self.refuses, self.kernels, self.error = refuses, kernels, error

    def capture(self, model, args, kwargs, *, batch_size, rewind):
        self.order.append(batch_size)
        for _ in range(3):
            model(*args, **kwargs)
            rewind()
        model(*args, **kwargs)
        if batch_size in self.refuses:
            raise self.error or CaptureRefusal("operation not permitted", hazard="host-sync", operation="aten.item")
        graph = FakeGraph(model, batch_size=batch_size)
        graph.receipt = Receipt(batch_size=batch_size, operations=1, kernels=self.kernels)
        self.graphs.append(graph)
        return graph


def examples_of(*sizes, **kwargs):
    return {size: Example(args=(torch.randn(size, 3),), kwargs=kwargs) for size in sizes}


def capture(model, pool, *sizes, **options):
    options.setdefault("backend", FakeBackend())
    options.setdefault("examples", examples_of(*sizes))
    return capture_batches(lambda _: model, options.pop("examples"), pool, model=model, **options)


def test_the_largest_batch_comes_first_in_order_and_in_the_result():
    pool = FakePool()
    found = capture(nn.Linear(3, 3), pool, 1, 8, 2)
    assert pool.order == [8, 2, 1]
    assert list(found.graphs) == [8, 2, 1]
    assert found.refused is None
    assert found.refused_batch is None


def test_each_batch_size_captures_its_own_call():
    calls = {2: nn.Linear(3, 3), 4: nn.Linear(3, 3)}
    found = capture_batches(calls.get, examples_of(2, 4), FakePool(), model=calls[2], backend=FakeBackend())
    assert all(found.graphs[size].model is calls[size] for size in calls)


def test_progress_names_each_capture_before_it_begins():
    lines = []
    capture(nn.Linear(3, 3), FakePool(), 1, 2, progress=lines.append)
    assert lines == ["capture batch 2", "capture batch 1"]


def everything(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("refuses", [(), (2,)], ids=["captured", "refused"])
def test_warm_up_and_capture_leave_buffers_and_generators_as_they_were(refuses):
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5)).train()
    before = everything(model)
    examples = examples_of(1, 2, 4) | {1: Example(args=(torch.randn(2, 3),), kwargs={})}
    random = torch.get_rng_state()
    capture(model, FakePool(refuses=refuses), examples=examples)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


def test_every_warm_up_and_every_capture_starts_from_the_same_values():
    seen = []

    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.tensor(0))

        def forward(self, x):
            seen.append(self.steps.item())
            self.steps.add_(1)

    capture(Steps(), FakePool(), 1, 2)
    assert seen == [0] * 8


def test_a_cache_among_the_arguments_is_brought_back_too():
    class Cache:
        def __init__(self):
            self.keys, self.length = torch.zeros(3), 0

    def model(x, *, cache):
        cache.keys += 1
        cache.length += 1

    cache = Cache()
    capture(model, FakePool(), examples=examples_of(1, 2, cache=cache))
    assert not cache.keys.any()
    assert cache.length == 0


def test_what_a_capture_rebinds_stays_alive_beside_the_graphs():
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.total = torch.zeros(3)

        def forward(self, x):
            self.total = self.total + 1

    model = Grows()
    first = model.total
    found = capture(model, FakePool(), 2)
    assert model.total is first
    assert [tensor.tolist() for tensor in found.kept] == [[4.0, 4.0, 4.0]]


def test_the_addresses_of_the_state_are_reported():
    model = nn.Linear(3, 3)
    found = capture(model, FakePool(), 2)
    assert found.addresses == {"weight": model.weight.data_ptr(), "bias": model.bias.data_ptr()}
    assert found.kept == ()


def test_the_first_refusal_ends_it_and_keeps_the_graphs_before():
    pool = FakePool(refuses=(2,))
    found = capture(nn.Linear(3, 3), pool, 1, 2, 4)
    assert list(found.graphs) == [4]
    assert pool.order == [4, 2]
    assert found.refused_batch == 2
    assert found.refused.hazard == "host-sync"
    assert str(found.refused) == "operation not permitted (aten.item)"


def test_an_empty_graph_is_a_refusal_and_is_closed():
    pool = FakePool(kernels=0)
    found = capture(nn.Linear(3, 3), pool, 2)
    assert not found.graphs
    assert str(found.refused) == "the graph is empty: the call launches nothing on the device"
    assert pool.graphs[0].closed


def test_a_backend_that_cannot_count_kernels_is_believed():
    assert list(capture(nn.Linear(3, 3), FakePool(kernels=None), 2).graphs) == [2]


def test_compiled_code_that_never_ran_is_a_refusal():
    pool = FakePool()
    found = capture(nn.Linear(3, 3), pool, 2, executions=lambda _: 7)
    assert not found.graphs
    assert str(found.refused) == (
        "the compiled code did not run during warm-up and capture: the call went to eager code instead"
    )
    assert pool.graphs[0].closed


def test_compiled_code_that_ran_is_captured():
    ran = SimpleNamespace(count=0)

    def call(x):
        ran.count += 1
        return x + 1

    assert list(capture(call, FakePool(), 2, executions=lambda _: ran.count).graphs) == [2]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), InputError("no"), RuntimeError("CUDA error")], ids=str)
def test_other_errors_pass_through_and_leave_the_state_as_it_was(error):
    model = nn.BatchNorm1d(3).train()
    with pytest.raises(type(error)):
        capture(model, FakePool(refuses=(2,), error=error), 2)
    assert model.num_batches_tracked.item() == 0


def test_a_device_that_cannot_be_brought_back_does_not_hide_the_first_error():
    class Broken(FakeBackend):
        def set_rng_state(self, state):
            raise RuntimeError("CUDA error: again")

    with pytest.raises(RuntimeError, match="the first"):
        capture(nn.Linear(3, 3), FakePool(refuses=(2,), error=RuntimeError("the first")), 2, backend=Broken())


def test_what_cannot_be_brought_back_is_named():
    class Forgetful(FakeBackend):
        def set_rng_state(self, state):
            pass

    with pytest.raises(CudagraphError) as caught:
        capture(nn.Dropout().train(), FakePool(), 2, backend=Forgetful())
    assert str(caught.value) == (
        "warm-up and capture must not change the model, but could not restore: the random generators"
    )
