"""The user's ``reset``: tried out once, then used instead of copies of the state."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.unit.pipeline.test_model_run import run_of
from torch import nn

from pytest_cudagraph import pipeline
from pytest_cudagraph.errors import InputError
from pytest_cudagraph.state.storages import SavedStorage
from pytest_cudagraph.values import Verdict

PLACES, AT = 4, 3


class Decodes(nn.Module):
    """Appends to a cache in which one place is left."""

    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.arange(float(PLACES)).repeat(2, 1))
        self.register_buffer("position", torch.tensor([AT]))

    def forward(self, x):
        keys = self.keys[: len(x)]
        keys.index_copy_(1, self.position, x[:, :1])
        self.position.add_(1)
        return keys.cumsum(1) * self.position


def stages_with(model, reset):
    with run_of(model, args=(torch.ones(1, 4),)) as run:
        return pipeline.run_stages(replace(run, model=replace(run.model, reset=reset)))


def test_a_reset_brings_back_each_sample_and_no_cache_is_copied_for_one(monkeypatch):
    model, calls, restored = Decodes(), [], []

    def reset():
        calls.append(len(restored))
        model.position.fill_(AT)

    restore = SavedStorage.restore
    monkeypatch.setattr(SavedStorage, "restore", lambda saved: restored.append(restore(saved)))
    assert stages_with(model, reset).verdict is Verdict.PASSED
    # For each batch size one trial, then eager, replay, and the replays whose operations are timed.
    assert len(calls) > 2 * 4
    assert calls[1] == calls[2] == calls[3]
    assert model.position == AT


def forgets(model):
    pass


def forgets_with_a_place_left(model):
    pass


def moves_elsewhere(model):
    model.position.fill_(AT - 1)


def makes_a_new_tensor(model):
    model.position = torch.tensor([AT])


def raises(model):
    raise ValueError("no such cache")


def test_a_reset_that_does_not_bring_the_state_back_is_one_clear_error(golden):
    lines = []
    for wrong in (forgets, forgets_with_a_place_left, moves_elsewhere, makes_a_new_tensor, raises):
        model = Decodes()
        if wrong is forgets_with_a_place_left:
            model.keys.resize_(2, PLACES + 1)[:, PLACES] = 0
        with pytest.raises(InputError) as error:
            stages_with(model, lambda wrong=wrong, model=model: wrong(model))
        lines += [f"{wrong.__name__}:", f"  {error.value}", ""]
        assert model.position == AT
    golden("reset-errors.txt", "\n".join(lines))


def test_a_reset_that_cannot_be_called_is_refused():
    with pytest.raises(InputError, match=r"reset takes a function without arguments, .*; found int"):
        stages_with(Decodes(), 3)
