"""The runner never serves a graph of a model that has changed since: weights, flags, autocast."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_cudagraph import GraphRunner


def transpose(model):
    model[0].weight.data = model[0].weight.data.t()


def replace_data(model):
    model[0].weight.data = model[0].weight.data * 2


def replace_parameter(model):
    model[0].weight = nn.Parameter(torch.zeros_like(model[0].weight))


def load_other(model):
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()}, assign=True)


def away_and_back(model):
    model.cpu()
    held = torch.empty(64, 64, device="cuda")  # takes the place the weights had
    model.cuda()
    del held


def narrower(model):
    model.to(torch.bfloat16).to(torch.float32)


def train(model):
    model.train()


CHANGES = [transpose, replace_data, replace_parameter, load_other, away_and_back, narrower]


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)).cuda().eval()


def eager(model, x):
    with torch.inference_mode():
        return model(x)


@pytest.mark.parametrize("change", CHANGES)
def test_after_a_change_of_the_weights_answers_are_those_of_eager(model, change):
    x = torch.randn(4, 64, device="cuda")
    with GraphRunner(model, x, batch_sizes=(2, 4)) as run:
        torch.testing.assert_close(run(x), eager(model, x))
        change(model)
        torch.testing.assert_close(run(x), eager(model, x))
        torch.testing.assert_close(run(x[:2]), eager(model, x[:2]))
        assert run.statistics.state_changes == 1
        assert not run.statistics.eager, run.statistics.lines()


def test_another_training_flag_is_captured_anew(model):
    x = torch.randn(4, 64, device="cuda")
    with GraphRunner(model, x, batch_sizes=(4,)) as run:
        run(x)
        model.train()
        run(x)
        assert model[1].num_batches_tracked.item() == 1
        assert run.statistics.state_changes == 1


def test_a_call_in_another_autocast_is_not_served_by_the_graph(model):
    x = torch.randn(4, 64, device="cuda")
    with GraphRunner(model, x, batch_sizes=(4,)) as run:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert run(x).dtype is torch.bfloat16
        assert run(x).dtype is torch.float32
        assert dict(run.statistics.eager) == {"other autocast": 1}


def test_a_bounded_runner_goes_round_its_sizes_without_a_fault(model):
    x = torch.randn(8, 64, device="cuda")
    with GraphRunner(model, x, batch_sizes=(1, 2, 4, 8), max_graphs=2) as run:
        for rows in (8, 4, 2, 1, 8, 2, 4, 1, 8):
            torch.testing.assert_close(run(x[:rows]), eager(model, x[:rows]))
        assert run.statistics.evictions >= 5
    torch.cuda.synchronize()
