"""Python values that move now and decide in a later call, found by the check before that call."""

from __future__ import annotations

import itertools
import os
import random
import sys

import numpy as np
import pytest
import torch
from tests.unit.check.fakes import AnswersCapture, FakeGraph, check_graphs, check_one
from tests.unit.check.test_check import text_of
from torch import nn

from pytest_cudagraph.check import batch_check, later_calls
from pytest_cudagraph.check.python_places import RanCode, places_of
from pytest_cudagraph.values import Agreement, Disagreement


class Counts(nn.Module):
    """Counts its calls; ``scale_of`` gives what the result is multiplied by."""

    def __init__(self, scale_of):
        super().__init__()
        self.calls, self.scale_of = 0, scale_of

    def forward(self, x):
        self.calls += 1
        return x * self.scale_of(self.calls)


def scaled_at_capture(model):
    """A replay has the number of the capture."""
    return FakeGraph(lambda x: x * model.scale_of(1))


def checked(scale_of, **options):
    model = Counts(scale_of)
    return check_one(model, scaled_at_capture(model), **options), model


@pytest.mark.parametrize(
    "scale_of",
    [
        lambda calls: 1.0 if calls < 40 else 0.5,
        lambda calls: 1.0 if calls < 90_000 else 0.5,
        lambda calls: 1.0 + (calls % 7 == 0),
        lambda calls: 1.0 + (calls % 1000 == 0),
        lambda calls: {777: 2.0}.get(calls, 1.0),
        lambda calls: 0.5 ** (calls // 5000),
    ],
)
def test_a_later_decision_is_wrong_now_whenever_it_comes(scale_of):
    assert isinstance(checked(scale_of)[0], Disagreement)


def test_a_later_difference_names_the_value_that_moved(golden):
    golden("check-later-call.txt", text_of(checked(lambda calls: 1.0 if calls < 4000 else 0.5)[0]))


@pytest.mark.parametrize("scale_of", [lambda calls: 1.0, lambda calls: 1.0 if calls % 50 else 2.0 - 1.0])
def test_a_value_that_decides_nothing_passes_and_leaves_nothing_open(scale_of):
    found, _ = checked(scale_of)
    assert isinstance(found, Agreement)
    assert found.not_judged == ()


def test_every_value_is_set_back():
    class Holder:
        total = 0

    def scale_of(calls):
        Holder.total += 2
        return 1.0

    found, model = checked(scale_of)
    assert isinstance(found, Agreement)
    assert model.calls == 0
    # No snapshot restores a class: it has counted the calls that were made, and not those of 100,000 calls ahead.
    assert 0 < Holder.total < 400


def test_eager_that_raises_from_a_value_of_its_own_is_no_difference():
    def scale_of(calls):
        if calls > 30:
            raise IndexError("the cache is full")
        return 1.0

    found, _ = checked(scale_of)
    assert isinstance(found, Agreement)
    assert found.not_judged == ("later calls: with live Python values, call 31 raised IndexError: the cache is full",)


def test_what_moves_and_cannot_be_set_is_told_by_name():
    generator = random.Random(1)

    def scale_of(calls):
        generator.random()
        return 1.0

    assert checked(scale_of)[0].not_judged == (
        "calls after the first 128: generator (Random) moves with each, and cannot be set forward",
    )


def test_the_value_of_an_environment_variable_is_not_shown(monkeypatch):
    monkeypatch.setenv("TOKEN_OF_STEP", "secret0")

    def scale_of(calls):
        os.environ["TOKEN_OF_STEP"] = f"secret{calls}"
        return 1.0 if calls < 100 else 2.0

    text = text_of(checked(scale_of)[0])
    assert "calls" in text
    assert "secret" not in text


class Odd(int):
    """A number that no arithmetic takes."""

    def __sub__(self, other):
        raise TypeError("no difference")


def test_numbers_of_other_classes_are_left_alone():
    model = Counts(lambda calls: 1.0)
    model.odd = Odd(3)
    assert isinstance(check_one(model, scaled_at_capture(model)), Agreement)
    assert "odd" not in places_of([model], RanCode())


def test_a_profiler_of_the_user_is_left_alone():
    def profiler(frame, event, arg):
        return None

    sys.setprofile(profiler)
    try:
        found, _ = checked(lambda calls: 1.0 if calls < 40 else 0.5)
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert isinstance(found, Disagreement)


def test_slow_models_get_fewer_calls_and_are_told_what_is_lost(monkeypatch):
    model = nn.Linear(3, 3)
    graphs, lines = {size: FakeGraph(model, batch_size=size) for size in (2, 4)}, []
    examples = {size: (torch.randn(size, 3),) for size in graphs}
    monkeypatch.setattr(later_calls, "_STILL_S", 0)
    many = check_graphs(model, graphs, examples)
    monkeypatch.setattr(batch_check, "SLOW_S", 0)
    few = check_graphs(model, graphs, examples, progress=lines.append)
    assert many[4].adversaries
    assert few[2].adversaries == many[2].adversaries
    assert few[4].adversaries == ()
    assert "changed parameters were tried at batch 2 only" in few[4].notes[0]
    assert few[2].replays == many[2].replays
    assert few[4].replays == 3  # one new input, the rows of batch 2 beside others, and the input once more
    assert few[4].warnings == ()
    assert any(" left" in line for line in lines)


NOISE = 3e-5


class NoisyFrom(FakeGraph):
    """Its replays from the third on have another rounding."""

    def answer(self, x):
        return x + NOISE * (self.replays >= 3)


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_noise_of_a_larger_size_of_a_slow_model_is_tolerated(monkeypatch, first, seed):
    """The other size repeats, so eager runs once at first."""
    monkeypatch.setattr(batch_check, "SLOW_S", 0)
    calls = itertools.count(first)

    def model(x):
        return x + NOISE * (next(calls) % 3) if x.shape[0] == 4 else x + 0

    graphs = {2: FakeGraph(model), 4: NoisyFrom(model, batch_size=4)}
    found = check_graphs(model, graphs, {size: (torch.randn(size, 3),) for size in graphs}, seed=seed)
    assert found[2].eager_repeatable
    assert isinstance(found[4], Agreement)
    assert not found[4].eager_repeatable


def test_a_larger_size_of_a_slow_model_shows_a_replay_of_old_inputs(monkeypatch):
    monkeypatch.setattr(batch_check, "SLOW_S", 0)
    model, examples = nn.Linear(3, 3), {size: (torch.randn(size, 3),) for size in (2, 4)}
    graphs = {2: FakeGraph(model, batch_size=2), 4: AnswersCapture(model, examples[4], batch_size=4)}
    found = check_graphs(model, graphs, examples)
    assert isinstance(found[2], Agreement)
    assert "stale input" in text_of(found[4])


def test_a_larger_size_of_a_slow_model_whose_first_input_is_not_new_is_tried_again(monkeypatch):
    monkeypatch.setattr(batch_check, "SLOW_S", 0)

    def model(token):
        return token * 2

    graphs = {size: FakeGraph(model, batch_size=size) for size in (2, 4)}
    found = check_graphs(model, graphs, {size: (torch.full((size,), 7),) for size in graphs})
    assert found[4].replays == 4
    assert not any("hold nothing" in note for note in found[4].notes)


def test_places_are_found_by_name_and_written_where_they_are():
    class Slotted:
        __slots__ = ("step",)

        def __init__(self):
            self.step = 1

    model = Counts(lambda calls: 1.0)
    model.slotted, model.pair, model.table = Slotted(), (1, 2), {"a": [3]}
    places = places_of([model], RanCode())
    for name, value in {"slotted.step": 10, "pair[1]": 20, "table['a'][0]": 30, "calls": 40}.items():
        places[name].write(value)
    assert (model.slotted.step, model.pair, model.table, model.calls) == (10, (1, 20), {"a": [30]}, 40)


class Batch:
    def __init__(self, mask):
        self.mask = mask


def test_an_argument_that_is_an_object_is_told_to_be_the_same_in_every_trial():
    def model(x, batch):
        return x * batch.mask

    found = check_one(model, FakeGraph(model), torch.randn(2, 3), Batch(torch.ones(2, 3)))
    assert found.notes == ("args[1] (Batch) is the same object in every trial: draw= can give others",)


@pytest.mark.parametrize("as_output", [np.int64, lambda calls: np.full(3, calls)])
def test_outputs_of_numpy_are_compared(as_output):
    class Returns(Counts):
        def forward(self, x):
            self.calls += 1
            return x + 1, as_output(self.calls)

    found = check_one(Returns(None), FakeGraph(lambda x: (x + 1, as_output(7))))
    assert found.where == "output[1]"
    assert found.finding_id == "baked-scalar"
    agreed = check_one(lambda x: (x + 1, as_output(7)), FakeGraph(lambda x: (x + 1, as_output(7))))
    assert agreed.not_compared == ()
