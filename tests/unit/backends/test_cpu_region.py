"""Compiled code is one step of a tape: run as a whole, counted, never looked into."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_cudagraph import hazards
from pytest_cudagraph.backends.cpu import CpuBackend
from pytest_cudagraph.errors import CaptureRefusal


@pytest.fixture
def backend():
    return CpuBackend()


def test_a_region_counts_its_direct_calls(backend):
    region = backend.region(lambda x: x + 1, "add")
    assert region(torch.zeros(1)).tolist() == [1]
    assert region.executions == 1


def test_a_region_is_one_kernel_and_counts_replays_but_not_recordings(backend):
    region = backend.region(lambda x, y: (x @ y, x + y), "matmul and sum")
    with backend.pool() as pool:
        graph = pool.capture(lambda x: region(x * 2, x)[0] + 1, (torch.eye(2),), {}, batch_size=2)
        assert region.executions == 3  # the warm-ups
        assert graph.receipt.kernel_names == {"aten.mul": 1, "matmul and sum": 1, "aten.add": 1}
        assert (graph.receipt.kernels, graph.receipt.operations, graph.receipt.opaque_regions) == (3, 3, 1)
        given = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        assert torch.equal(graph(given), 2 * given @ given + 1)
        assert region.executions == 4


def test_a_region_may_return_nested_outputs_numbers_and_its_own_input(backend):
    region = backend.region(lambda x: {"same": x, "new": [x + 1, None, 3]}, "nested")
    with backend.pool() as pool:
        graph = pool.capture(lambda x: region(x * 1), (torch.zeros(2),), {}, batch_size=2)
        graph.poison()
        out = graph(torch.tensor([1.0, 2.0]))
    assert out["same"].tolist() == [1, 2]
    assert out["new"][0].tolist() == [2, 3]
    assert out["new"][1:] == [None, 3]


def test_a_region_takes_its_inputs_as_a_list_which_it_may_empty(backend):
    def boxed(inputs):
        x, y = inputs
        inputs.clear()
        return [x + y]

    boxed._boxed_call = True
    region = backend.region(boxed, "boxed")
    assert region._boxed_call
    with backend.pool() as pool:
        graph = pool.capture(lambda x: region([x, x * 2])[0], (torch.zeros(2),), {}, batch_size=2)
        assert graph(torch.ones(2)).tolist() == [3, 3]
        assert graph(torch.ones(2) * 2).tolist() == [6, 6]


def test_what_a_region_writes_happens_at_replays_only(backend):
    steps = torch.zeros(1)
    region = backend.region(lambda x, state: state.add_(1) + x, "writes")
    with backend.pool() as pool:
        graph = pool.capture(lambda x: region(x, steps), (torch.zeros(1),), {}, batch_size=1)
        assert steps.item() == 3
        assert graph.replay().item() == 4
        assert graph.replay().item() == 5
        assert steps.item() == 5


def test_what_a_region_keeps_is_never_poisoned(backend):
    kept = torch.ones(2)
    region = backend.region(lambda x: (kept, x + kept), "keeps")
    with backend.pool() as pool:
        graph = pool.capture(lambda x: region(x), (torch.zeros(2),), {}, batch_size=2)
        graph.poison()
        assert kept.tolist() == [1, 1]
        assert [out.tolist() for out in graph.replay()] == [[1, 1], [1, 1]]


def test_a_region_may_read_values_inside(backend):
    region = backend.region(lambda x: x * x.sum().item(), "reads")
    with backend.pool() as pool:
        graph = pool.capture(lambda x: region(x), (torch.ones(2),), {}, batch_size=2)
        assert graph(torch.tensor([1.0, 2.0])).tolist() == [3, 6]


def compiled_by_region(backend, model):
    """The model compiled as the compile stage does it, and its regions."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    regions = []

    def inner(module, inputs, **options):
        regions.append(backend.region(compile_fx_inner(module, inputs, **options), "inductor"))
        return regions[-1]

    def compiler(module, inputs):
        return compile_fx(module, inputs, inner_compile=inner)

    return torch.compile(model, backend=compiler, dynamic=False), regions


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_code_is_captured_compiled_across_a_graph_break(backend):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.register_buffer("steps", torch.zeros(1))

        def forward(self, x):
            x = self.first(x).relu()
            torch._dynamo.graph_break()
            self.steps.add_(1)
            return self.second(x) + self.steps

    torch._dynamo.reset()
    model = Model().eval()
    compiled, regions = compiled_by_region(backend, model)
    with backend.pool() as pool:
        graph = pool.capture(compiled, (torch.randn(2, 8),), {}, batch_size=2)
        assert len(regions) == 2
        assert graph.receipt.opaque_regions == 2
        executions = [region.executions for region in regions]
        for _ in range(2):
            given = torch.randn(2, 8)
            steps = model.steps.clone()
            graph.poison()
            found = graph(given).clone()
            assert torch.equal(model.steps, steps + 1)
            model.steps.copy_(steps)
            with backend.running():
                torch.testing.assert_close(found, model(given))
        assert [region.executions for region in regions] == [count + 2 for count in executions]
    before, given = regions[0].executions, torch.randn(2, 8)
    with backend.running():
        compiled(given)
    assert regions[0].executions == before + 1  # compiled code is still used after the capture


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compile_during_the_capture_is_refused(backend):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, n: x * n, backend="eager", dynamic=False)
    numbers = iter((1, 1, 1, 2))
    with backend.pool() as pool:
        with pytest.raises(CaptureRefusal) as caught:
            pool.capture(lambda x: compiled(x, next(numbers)), (torch.ones(2),), {}, batch_size=2)
        assert (caught.value.text, caught.value.hazard) == (hazards.RNG_STATE_TEXT, "control-flow")
        assert caught.value.operation == "torch.compile"
        assert caught.value.site.file == __file__
        graph = pool.capture(lambda x: compiled(x, 1), (torch.ones(2),), {}, batch_size=2)
        assert graph(torch.full((2,), 5.0)).tolist() == [5, 5]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_condition_on_a_tensor_is_refused_as_the_host_reads_it(backend):
    with backend.pool() as pool, pytest.raises(CaptureRefusal) as caught:
        pool.capture(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), (torch.ones(2),), {}, batch_size=2)
    assert (caught.value.hazard, caught.value.text) == ("host-sync", hazards.CAPTURE_UNSUPPORTED.text)
    assert (caught.value.operation, caught.value.site.file) == ("cond", __file__)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_higher_order_operator_is_judged_by_its_parts(backend):
    """Without a compiler, flex_attention sends a number to the device in each call."""
    from torch.nn.attention.flex_attention import flex_attention

    query = torch.randn(1, 2, 16, 8)
    with backend.pool() as pool, pytest.raises(CaptureRefusal) as caught:
        pool.capture(lambda x: flex_attention(x, x, x), (query,), {}, batch_size=1)
    assert (caught.value.hazard, caught.value.operation) == ("host-data", "torch.tensor")
    assert caught.value.site.file == __file__
