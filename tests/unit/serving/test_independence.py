"""Rows that depend on the rows beside them are not padded: such a call runs eager, and the reason is counted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_cudagraph import GraphRunner


def runner(model, *example, **options):
    options.setdefault("batch_sizes", (4,))
    return GraphRunner(model, *example, device="cpu", **options)


def eager(model, x):
    with torch.inference_mode():
        return model(x)


class Attention(nn.Module):
    """Attends over the batch instead of the sequence, by a forgotten transpose."""

    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


class Gathers(nn.Module):
    """Takes each row's answer from the row before."""

    def forward(self, x):
        return x.roll(1, 0) * 2


MIXES = {
    "batch norm in training": (nn.BatchNorm1d(3).train(), (4, 3), "output depends on the number of rows"),
    "attention over the batch": (Attention().eval(), (4, 5, 4), "output depends on the number of rows"),
    "softmax over the batch": (nn.Softmax(0), (4, 3), "output depends on the number of rows"),
    "mean over the batch": (lambda x: (x * 2, x.mean(0)), (4, 3), "output[1] depends on the number of rows"),
    "count of rows": (lambda x: x / x.shape[0], (4, 3), "output depends on the number of rows"),
    "another row": (Gathers(), (4, 3), "output depends on the number of rows"),
}


@pytest.mark.parametrize(("model", "shape", "why"), MIXES.values(), ids=MIXES.keys())
def test_rows_that_depend_on_each_other_are_never_padded(model, shape, why):
    run, x = runner(model, torch.randn(shape)), torch.randn(3, *shape[1:])
    found, expected = run(x), eager(model, x)
    torch.testing.assert_close(found, expected)
    assert run.statistics.not_padded == why
    assert run.statistics.padded == 0
    assert run.statistics.eager == {"rows depend on each other": 1}


def test_batches_of_a_captured_size_are_replayed_all_the_same():
    run, x = runner(nn.Softmax(0), torch.randn(4, 3)), torch.randn(4, 3)
    assert torch.equal(run(x), eager(nn.Softmax(0), x))
    assert run.statistics.hits == 1


def test_an_example_of_equal_rows_hides_nothing():
    """Every row is the mean of all rows: only rows made up beside them show it."""
    run = runner(lambda x: x - x.mean(0), torch.ones(1, 3))
    x = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    assert run(x).tolist() == [[-1.0, 0.0, 1.0], [1.0, 0.0, -1.0]]
    assert run.statistics.not_padded == "output depends on the other rows"


def test_a_model_that_draws_random_numbers_is_tried_with_the_same_draws():
    apart = runner(nn.Dropout(0.5).train(), torch.randn(4, 64))
    apart(torch.randn(3, 64))
    mixed = runner(lambda x: nn.functional.dropout(x, 0.5) + x.sum(0), torch.randn(4, 64))
    mixed(torch.randn(3, 64))
    assert apart.statistics.padded == 1
    assert mixed.statistics.not_padded == "output depends on the other rows"


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.GELU()).eval(), (4, 3)),
        (nn.Conv2d(3, 4, 3).eval(), (4, 3, 8, 8)),
        (nn.LSTM(4, 8, batch_first=True).eval(), (4, 5, 4)),
        (nn.TransformerEncoderLayer(8, 2, batch_first=True).eval(), (4, 5, 8)),
        (nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5)).eval().bfloat16(), (4, 3)),
    ],
    ids=["mlp", "convolution", "lstm", "transformer", "half precision"],
)
def test_independent_rows_are_padded(model, shape):
    x = torch.randn(shape, dtype=next(model.parameters()).dtype)
    run = runner(model, x)
    run(x[:3])
    assert run.statistics.not_padded == ""
    assert run.statistics.padded == 1


def test_a_model_that_takes_no_rows_that_were_made_up_is_padded():
    table = nn.Embedding(1, 2)

    def only_ones(x):
        return table(1 - x[:, 0].long())  # any smaller number reads past the end of the table

    run = runner(only_ones, torch.ones(4, 3))
    run(torch.ones(3, 3))
    assert run.statistics.not_padded == ""


def test_finding_out_leaves_no_trace_in_the_model():
    model = nn.BatchNorm1d(3).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    example, random = torch.randn(4, 3), torch.get_rng_state()
    runner(model, example)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


def test_rows_that_are_trusted_are_padded():
    run = runner(nn.Softmax(0), torch.randn(4, 3), check_rows=False)
    run(torch.randn(3, 3))
    assert run.statistics.padded == 1


def test_a_model_that_has_changed_is_tried_anew():
    model = nn.BatchNorm1d(3).eval()
    run = runner(model, torch.randn(4, 3))
    run(torch.randn(3, 3))
    model.train()
    run(torch.randn(3, 3))
    assert run.statistics.padded == 1
    assert run.statistics.eager == {"rows depend on each other": 1}
