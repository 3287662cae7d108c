"""Generators of a model's own: replays draw from them as eager does, and a capture leaves them where they stood."""

from __future__ import annotations

import pytest
import torch
from torch import nn


class Draws(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.generator = torch.Generator(device).manual_seed(11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(x.shape, generator=self.generator, device=x.device)


def test_a_capture_leaves_a_generator_of_the_models_own_where_it_stood(backend, capture):
    model = Draws(backend.device)
    before = model.generator.get_state().clone()
    capture(model, torch.zeros(8, device=backend.device))
    assert torch.equal(model.generator.get_state(), before)


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_replays_draw_from_it_as_eager_does_and_advance_it(capture, copied, device):
    model, x = Draws(device), torch.zeros(1024, device="cuda:0")
    graph = capture(model, x)
    first, second = copied(graph(x)), copied(graph(x))
    assert not torch.equal(first, second)
    model.generator.manual_seed(11)
    assert torch.equal(model(x), first)
    assert torch.equal(model(x), second)


def test_it_does_not_move_the_default_generator(backend, capture):
    model, x = Draws(backend.device), torch.zeros(64, device=backend.device)
    graph = capture(model, x)
    before = torch.cuda.get_rng_state()
    graph(x)
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_two_generators_are_replayed_in_one_graph(backend, capture, copied):
    one, other = Draws(backend.device), Draws(backend.device)
    other.generator.manual_seed(12)
    x = torch.zeros(256, device=backend.device)
    graph = capture(lambda x: one(x) - other(x), x)
    first = copied(graph(x))
    one.generator.manual_seed(11)
    other.generator.manual_seed(12)
    assert torch.equal(one(x) - other(x), first)
