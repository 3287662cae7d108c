"""Capture and check on the real twin of the CPU: what holds with fakes holds there."""

from __future__ import annotations

import pytest
import torch
from tests.checked import checked
from torch import nn

from pytest_cudagraph import inputs
from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.values import Agreement, Disagreement

SIZES = (1, 2, 4)


def check_model(model, *args, **kwargs):
    """The story of capture and check; the verdict by batch size."""
    examples = inputs.batch_examples(inputs.Example(args=args, kwargs=kwargs), SIZES)
    return checked(model, examples, open_backend("cpu"), seed=3)


class BatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return {"normed": self.norm(x), "count": self.norm.num_batches_tracked}


class Cache(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(8, 4))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))

    def forward(self, x):
        self.keys.index_copy_(0, self.position, x.mean(0, keepdim=True))
        self.position.add_(1)
        return x + self.keys.sum(0)


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), (1, 4)),
        (nn.LSTM(4, 8, batch_first=True).eval(), (1, 5, 4)),
        (BatchNorm().train(), (1, 4, 6)),
        (nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5)).train(), (1, 4)),
        (Cache(), (1, 4)),
        (Noisy(), (1, 4)),
    ],
    ids=["mlp", "lstm", "batch norm in training", "dropout in training", "cache", "noise"],
)
def test_replays_of_the_twin_equal_eager_bit_for_bit(model, shape):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    example = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = check_model(model, example)
    assert list(found) == [4, 2, 1]
    assert all(isinstance(verdict, Agreement) and verdict.bit_exact for verdict in found.values())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


class Grows(nn.Module):
    def __init__(self):
        super().__init__()
        self.total = torch.zeros(1, 4)

    def forward(self, x):
        self.total = self.total + x.mean(0, keepdim=True)
        return x * 2


@pytest.mark.parametrize(
    ("model", "where", "hazard", "assigned"),
    [(Counter(), "output", "stateful-python", ("calls",)), (Grows(), "graph", "rebinds-state", ("total",))],
    ids=["counter", "rebound state"],
)
def test_silent_hazards_make_the_twin_differ(model, where, hazard, assigned):
    found = check_model(model, torch.ones(1, 4))
    assert all(isinstance(verdict, Disagreement) for verdict in found.values())
    assert {(verdict.where, verdict.finding_id) for verdict in found.values()} == {(where, hazard)}
    assert {tuple(each.name for each in verdict.assigned) for verdict in found.values()} == {assigned}


class Transposed(nn.Module):
    """Keeps a copy of its weight, made anew when the weight is another version."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))
        self.version, self.copy = -1, None

    def forward(self, x):
        if self.version != self.weight._version:
            self.version, self.copy = self.weight._version, self.weight.t().contiguous()
        return x @ self.copy


def test_a_copy_of_a_weight_that_eager_makes_anew_is_caught():
    model = Transposed()
    with torch.inference_mode():
        model(torch.ones(1, 4))
    found = check_model(model, torch.randn(1, 4))
    assert all(isinstance(verdict, Disagreement) for verdict in found.values())


def test_every_kind_of_inputs_is_tried_on_the_twin_and_rows_are_seen_to_be_independent():
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)).eval()
    found = check_model(model, torch.randn(1, 4))
    every = ("zeros", "large values", "rows in another order", "a row of NaN")
    assert [found[size].adversaries for size in (4, 2, 1)] == [every, every, (every[0], every[1], every[3])]
    assert all(verdict.notes == () for verdict in found.values())


def test_a_norm_over_the_batch_is_noted_on_the_twin():
    found = check_model(BatchNorm().train(), torch.randn(1, 4, 6))
    assert ["rows are not independent" in " ".join(found[size].notes) for size in (1, 2, 4)] == [True, True, False]


def test_weights_replaced_after_capture_are_caught():
    model = nn.Linear(4, 3).eval()
    kept = model.weight.detach()  # somebody else may hold the old weights; the twin refuses dead ones
    examples = inputs.batch_examples(inputs.Example(args=(torch.randn(1, 4),), kwargs={}), SIZES)

    def replace():
        model.weight.data = model.weight.data * 2

    found = checked(model, examples, open_backend("cpu"), seed=3, after_capture=replace)
    assert {verdict.finding_id for verdict in found.values()} == {"rebinds-state"}
    assert not torch.equal(kept, model.weight)


class PerSize(nn.Module):
    """A cache for the batch size of the last call, and no parameter."""

    def __init__(self, make):
        super().__init__()
        self.make = make
        self.register_buffer("cache", torch.ones(1, 4))

    def forward(self, x):
        if self.cache.shape[0] != x.shape[0]:
            self.cache = self.make(x)
        return x * self.cache


def test_a_cache_for_one_batch_size_is_noted_where_a_call_makes_it_anew():
    found = check_model(PerSize(torch.ones_like), torch.randn(1, 4))
    note = (
        "a first call at this batch size makes cache anew. A graph reads what was there at its capture: "
        "code that captures several sizes must keep that alive"
    )
    assert {size: verdict.notes for size, verdict in found.items()} == {4: (note,), 2: (note,), 1: ()}


def test_what_a_first_call_at_a_batch_size_computes_is_what_later_ones_compute(golden):
    found = check_model(PerSize(torch.Tensor.clone), torch.ones(1, 4))
    assert {verdict.finding_id for verdict in found.values()} == {"rebinds-state"}
    golden("check-first-call.txt", "\n".join([found[4].message, *found[4].evidence[1:]]))


def test_calls_at_other_sizes_between_capture_and_check_change_nothing():
    model = PerSize(torch.ones_like)
    examples = inputs.batch_examples(inputs.Example(args=(torch.randn(1, 4),), kwargs={}), SIZES)

    def call():
        for size in (2, 3):
            model(torch.randn(size, 4))

    found = checked(model, examples, open_backend("cpu"), seed=3, after_capture=call)
    assert all(isinstance(verdict, Agreement) for verdict in found.values()), found
