"""The check on real compiled code, whose numbers and whose weights may be its own."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config
from tests.checked import checked
from torch import nn

from pytest_cudagraph import inputs
from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.compile import compile_model
from pytest_cudagraph.values import Agreement

OWN_WEIGHTS = (
    "the compiled code holds weights of its own (a package, or frozen weights): it does not see an in-place change of "
    "the eager model's parameters"
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


class Normed(nn.Module):
    """Enough to be fused: norms and activations round otherwise under a compiler."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 4)

    def forward(self, x):
        return torch.softmax(self.last(nn.functional.gelu(self.norm(self.first(x)))), -1)


def check_compiled(folder):
    torch.manual_seed(0)
    model, backend = Normed().eval(), open_backend("cpu")
    examples = inputs.batch_examples(inputs.Example(args=(torch.randn(1, 8),), kwargs={}), (4,))
    with compile_model(model, examples, "inductor", backend, cache_dir=folder) as compiled:
        return checked(model, examples, backend, call_for=compiled.call_for, seed=3)[4]


def test_compiled_code_that_follows_its_parameters_agrees_without_a_note(tmp_path):
    found = check_compiled(tmp_path)
    assert isinstance(found, Agreement)
    assert found.notes == ()
    assert found.adversaries == ("zeros", "large values", "rows in another order", "a row of NaN")


# Those of a package: tests/unit/compile/test_compiled_replays.py.
def test_frozen_weights_are_noted(tmp_path):
    with torch._inductor.config.patch(freezing=True):
        assert check_compiled(tmp_path).notes == (OWN_WEIGHTS,)
