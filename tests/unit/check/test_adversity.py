"""Inputs that nobody gave as an example: which are tried, which faults only they show, and when they are left out."""

from __future__ import annotations

import warnings

import pytest
import torch
from tests.unit.check.fakes import FakeBackend, FakeGraph, check_one
from torch import nn

from pytest_cudagraph.values import Agreement, Disagreement

ALL = ("zeros", "large values", "rows in another order", "a row of NaN")


def double(x):
    return x * 2


class WrongWhere(FakeGraph):
    """Right on all inputs but those of one kind."""

    def __init__(self, model, is_one):
        super().__init__(model)
        self.is_one = is_one

    def answer(self, x):
        answer = self.model(x)
        return answer + 1 if self.is_one(x) else answer


@pytest.mark.parametrize(
    ("is_one", "kind"),
    [
        (lambda x: not x.any(), "zeros"),
        (lambda x: x.abs().max() > 20, "large values"),
        (lambda x: x.isnan().any() and not x.isnan().all(), "a row of NaN"),
    ],
    ids=["zeros", "large", "nan"],
)
def test_a_graph_that_is_wrong_on_one_kind_of_inputs_is_caught(is_one, kind):
    found = check_one(double, WrongWhere(double, is_one))
    assert isinstance(found, Disagreement)
    assert found.evidence[-1] == f"the inputs: {kind}"


def test_a_graph_that_keeps_the_order_of_its_rows_is_caught():
    """Booleans cannot be drawn anew; another order of their rows tells a graph that never reads them."""
    mask = torch.tensor([[True], [False]])

    def model(x, mask):
        return x * mask

    found = check_one(model, FakeGraph(lambda x, _: x * mask), torch.ones(2, 3), mask)
    assert found.evidence[-1] == "the inputs: rows in another order"


def test_inputs_that_eager_refuses_are_left_out():
    def model(x):
        assert not x.isnan().any(), "NaN"
        assert x.any(), "zeros"
        return x * 2

    found = check_one(model, FakeGraph(model))
    assert isinstance(found, Agreement)
    assert found.adversaries == ("large values", "rows in another order")
    assert found.notes == ()


def test_it_is_noted_where_eager_takes_none_of_them():
    calls = iter(range(100))  # a list would be brought back before each call

    def model(x):
        assert next(calls) < 4, "four calls are enough"
        return x * 2

    found = check_one(model, FakeGraph(double))
    assert found.adversaries == ()
    assert found.notes == (
        f"eager takes none of the adversarial inputs ({', '.join(ALL)}): only ordinary ones were tried",
    )


def test_whole_numbers_stay_within_the_range_of_the_example():
    def model(tokens):
        assert int(tokens.min()) >= 3, "too small"
        assert int(tokens.max()) <= 9, "too large"
        return tokens * 2

    found = check_one(model, FakeGraph(model), torch.tensor([[7, 3], [5, 9]]))
    assert found.adversaries == ("zeros", "rows in another order")


def test_what_the_model_warns_of_such_inputs_is_not_heard():
    def model(x):
        if not x.any() or x.isnan().any():
            warnings.warn("strange inputs", stacklevel=1)
        return x * 2

    assert check_one(model, FakeGraph(double)).adversaries == ALL


def test_nan_in_the_answer_to_nan_says_nothing_against_eager():
    assert check_one(double, FakeGraph(double)).notes == ()


def test_eager_that_does_not_repeat_itself_on_them_is_nothing_to_hold_a_graph_to():
    noise = iter(range(1, 1000))

    def model(x):
        return x * 2 + (next(noise) if not x.any() else 3e-6 * (next(noise) % 2))

    found = check_one(model, FakeGraph(double))
    assert isinstance(found, Agreement)
    assert found.adversaries == ("large values", "rows in another order", "a row of NaN")


def test_compiled_code_is_held_against_itself_there():
    """Where large values round is the compiler's affair; what the graph must do is what the compiled code does."""

    def compiled(x):
        return x * 2 + (1 if x.isfinite().all() and x.abs().max() > 20 else 0)

    assert isinstance(check_one(double, FakeGraph(compiled), captured=compiled), Agreement)
    assert isinstance(check_one(double, FakeGraph(compiled)), Disagreement)


class Cuda(FakeBackend):
    """Says that it is a GPU, whose kernels trap where a CPU's raise."""

    kind = "cuda"


class Buckets(nn.Module):
    """A table that is read where a number lies, as many rows as the example needs."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 2)
        self.read = []

    def forward(self, x):
        rows = (x * 3).long()
        self.read.append(rows)
        return self.table(rows)


def test_a_gpu_is_never_given_an_index_that_its_kernel_would_trap_on():
    model, example = Buckets(), torch.rand(2, 3)
    found = check_one(model, FakeGraph(model), example, backend=Cuda())
    assert isinstance(found, Agreement)
    assert found.adversaries == ("zeros", "rows in another order")


def test_a_gpu_is_given_no_strange_inputs_where_nobody_knows_the_operator():
    @torch.library.custom_op("adversity_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert check_one(twice, FakeGraph(twice)).adversaries == ALL
    assert check_one(twice, FakeGraph(twice), backend=Cuda()).adversaries == ()
