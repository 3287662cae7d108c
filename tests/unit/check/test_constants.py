"""Large parameters that eager does not write: not copied, compared by checksums, and changed reversibly."""

from __future__ import annotations

import pytest
import torch
from tests.unit.check.fakes import FakeGraph, check_one
from tests.unit.pipeline.test_model_run import run_of
from torch import nn

from pytest_cudagraph import pipeline
from pytest_cudagraph.check.weight_change import changed
from pytest_cudagraph.state import Constants
from pytest_cudagraph.state.storages import SMALL_BYTES, SavedStorage
from pytest_cudagraph.values import Agreement, Disagreement, Verdict

WIDTH = 256  # a square layer of 256 KiB


def layer():
    torch.manual_seed(1)
    return nn.Linear(WIDTH, WIDTH, bias=False).eval()


class WritesAWeight(FakeGraph):
    """Right outputs, but one weight is overwritten by replay number ``at``."""

    def __init__(self, model, at):
        super().__init__(model)
        self.at = at

    def answer(self, x):
        output = self.model(x).clone()
        if self.replays == self.at:
            self.model.weight[-1, -1] += 1e-6
        return output


@pytest.mark.parametrize("at", [1, 4], ids=["first replay", "adversarial replay"])
def test_a_replay_that_writes_to_a_parameter_is_caught_though_its_outputs_are_right(at):
    model = layer()
    found = check_one(model, WritesAWeight(model, at), torch.randn(2, WIDTH), constants=Constants.take(model))
    assert isinstance(found, Disagreement)
    assert found.where == "parameter 'weight'"
    assert found.message == "a replay writes to it, or eager on new inputs. Eager on the example does not"


def test_a_wrong_output_of_a_replay_that_also_writes_to_a_parameter_is_told_as_such():
    model = layer()

    class Wrong(WritesAWeight):
        def answer(self, x):
            return super().answer(x) + 1

    found = check_one(model, Wrong(model, 1), torch.randn(2, WIDTH), constants=Constants.take(model))
    assert (found.where, found.message[:6]) == ("output", "off by")


def test_a_parameter_replaced_or_changed_by_the_test_since_is_no_alarm():
    model = layer()
    constants, before = Constants.take(model), model.weight.data
    with torch.no_grad():
        model.weight.mul_(2)
    assert isinstance(check_one(model, FakeGraph(model), torch.randn(2, WIDTH), constants=constants), Agreement)
    model.weight.data = before.clone()
    assert isinstance(check_one(model, FakeGraph(model), torch.randn(2, WIDTH), constants=constants), Agreement)


@pytest.mark.parametrize("places", [(0, 1), (0, 600), (-1, -2)], ids=["in one block", "in two", "at the end"])
def test_two_exchanged_words_of_a_parameter_are_a_change(places):
    model = nn.Linear(WIDTH + 2, WIDTH + 1, bias=False)  # no whole number of blocks
    constants, words = Constants.take(model), model.weight.data.view(torch.int64).flatten()
    first, second = places
    assert constants.changed() == ()
    words[first], words[second] = words[second].clone(), words[first].clone()
    assert constants.changed() == ("weight",)


class CachesInAParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = layer()
        self.cache = nn.Parameter(torch.zeros(4, WIDTH, WIDTH), requires_grad=False)

    def forward(self, x):
        self.cache[: len(x), 0] += self.layer(x)
        return self.cache[: len(x), 0] * 2


def test_of_large_parameters_only_those_that_eager_writes_are_copied(monkeypatch):
    copied, init = set(), SavedStorage.__init__

    def noting(saved, storage):
        copied.add(storage.data_ptr())
        init(saved, storage)

    monkeypatch.setattr(SavedStorage, "__init__", noting)
    model = CachesInAParameter().eval()
    weight = model.layer.weight.clone()
    with run_of(model, args=(torch.randn(1, WIDTH),)) as run:
        report = pipeline.run_stages(run)
    assert report.verdict is Verdict.PASSED
    assert model.layer.weight.data_ptr() not in copied
    assert model.cache.data_ptr() in copied
    assert torch.equal(model.layer.weight, weight)


LARGE = 1 + SMALL_BYTES // 2
TENSORS = {
    "float32": torch.randn(LARGE),
    "float16": torch.randn(LARGE).half(),
    "bfloat16": torch.randn(LARGE).bfloat16(),
    "float64": torch.randn(LARGE, dtype=torch.float64),
    "complex64": torch.randn(LARGE, dtype=torch.complex64),
    "ones": torch.ones(LARGE),
    "zeros": torch.zeros(LARGE),
    "a late value": torch.eye(300)[:, 1:].flip(1),
    "transposed": torch.randn(300, 200).t(),
    "channels last": torch.randn(4, 8, 40, 50).to(memory_format=torch.channels_last),
    "with gaps": torch.randn(300, 400)[:, ::2],
    "small": torch.tensor([0.0, 1.0, -2.0]),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_change_of_weights_reaches_nearly_all_elements_and_leaves_no_bit_changed(name):
    tensor, before = TENSORS[name], TENSORS[name].clone()
    with torch.inference_mode(), changed([tensor]):
        differs = ~torch.isclose(tensor, before, rtol=5e-3, atol=0)
        expected = 0.85 if before.ne(0).sum() in (0, before.numel()) else 1 / before.numel()
        assert differs.float().mean() >= expected
        assert tensor.isfinite().all()
    assert tensor.view(torch.uint8).equal(before.view(torch.uint8)) if tensor.is_contiguous() else tensor.equal(before)
