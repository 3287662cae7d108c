"""The proof that a replay computes what eager computes: poison, stale buffers, sizes in shuffled order."""

from __future__ import annotations

import random

import pytest
import torch
from tests.checked import checked
from tests.gpu.small_models import Counts, LeavesItsOutputUnwritten, Mlp

from pytest_cudagraph.capture import capture_batches
from pytest_cudagraph.check import check_replays, reset_difference
from pytest_cudagraph.values import Agreement, Disagreement


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool])
def test_poison_fills_the_outputs_in_the_graphs_memory_and_a_replay_brings_them_back(backend, capture, dtype):
    x = torch.ones(1000, device=backend.device)
    graph = capture(lambda x: (x * 0).to(dtype), x)
    graph.poison()
    backend.synchronize()
    left = graph._output.clone()
    if dtype.is_floating_point:
        assert left.isnan().all()
    else:
        assert left.eq(True if dtype is torch.bool else torch.iinfo(dtype).max).all()
    assert not graph(x).any()


def test_poison_spares_inputs_parameters_and_tensors_held_elsewhere(backend, capture):
    layer, held = torch.nn.Linear(8, 8).cuda(), torch.full((8,), 7.0, device=backend.device)
    weight, x = layer.weight.detach().clone(), torch.ones(2, 8, device=backend.device)
    graph = capture(lambda x: (layer(x), layer.weight, held, x), x)
    graph.poison()
    backend.synchronize()
    assert graph._output[0].isnan().all()
    assert torch.equal(layer.weight, weight)
    assert held.eq(7).all()
    assert graph._output[3].eq(1).all()


def test_an_output_that_the_graph_never_writes_is_caught(backend, examples):
    found = checked(LeavesItsOutputUnwritten(), examples(4), backend)[4]
    assert isinstance(found, Disagreement)
    assert found.where == "output[0]"


def test_a_graph_that_is_called_but_not_launched_is_caught(backend, capture, examples):
    model, rows = Mlp().cuda().eval(), examples(4)
    graph = capture(model, *rows[4].args)

    class Idle:
        """Counts launches that never come: only the poison in the outputs can tell."""

        receipt, replays, poison = graph.receipt, 0, graph.poison

        def __call__(self, x):
            self.replays += 1
            return graph._output

    found = check_replays({4: Idle()}, lambda _: model, rows, model=model, backend=backend, seed=1)[4]
    assert isinstance(found, Disagreement)


def test_a_parameter_replaced_after_capture_is_caught_and_named(backend, examples):
    model, rows = Mlp().cuda().eval(), examples(4)
    held = model.head.weight.data

    def replace():
        model.head.weight.data = torch.zeros_like(held)

    found = checked(model, rows, backend, after_capture=replace)[4]
    assert isinstance(found, Disagreement)
    assert found.finding_id == "rebinds-state"
    assert "head.weight" in " ".join(found.evidence)


def test_every_batch_size_agrees_in_shuffled_order(backend, examples):
    found = checked(Mlp().cuda().eval(), examples(1, 2, 4, 8, 32, 96), backend)
    assert all(isinstance(each, Agreement) for each in found.values()), found
    assert all(each.replays >= 2 for each in found.values())


def test_state_after_each_replay_is_that_of_eager_and_is_put_back(backend, examples):
    model = Counts().cuda()
    found = checked(model, examples(2, 8), backend)
    assert all(isinstance(each, Agreement) for each in found.values()), found
    assert model.steps.item() == 0


def test_a_model_that_draws_agrees_with_eager_from_the_same_seed(backend, examples):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5)).cuda().train()
    found = checked(model, examples(2, 8), backend)
    assert all(isinstance(each, Agreement) for each in found.values()), found


def test_a_hundred_replays_of_many_sizes_in_shuffled_order_stay_right(backend, pool, examples):
    model, rows = Mlp().cuda().eval(), examples(1, 2, 4, 8, 32)
    graphs = capture_batches(lambda _: model, rows, pool, model=model, backend=backend).graphs
    order = random.Random(0).choices(sorted(graphs), k=100)
    with torch.inference_mode():
        for size in order:
            x = torch.randn(size, 64, device=backend.device)
            torch.testing.assert_close(graphs[size](x), model(x))


class Decodes(torch.nn.Module):
    """Appends to a cache of three places, of which two are left."""

    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(4, 3))
        self.register_buffer("position", torch.tensor([1]))

    def forward(self, x):
        self.keys.index_copy_(1, self.position, x[:, :1])
        self.position.add_(1)
        return self.keys.cumsum(1) + self.position


@pytest.mark.parametrize(("to", "says"), [(1, ""), (0, "after it, a call gives another output: ")])
def test_a_reset_is_tried_out_on_the_device(backend, examples, to, says):
    model = Decodes().cuda()
    found = reset_difference(model, lambda: model.position.fill_(to), examples(4)[4], backend, batch_size=4, seed=1)
    assert found.partition("off by")[0] == says
