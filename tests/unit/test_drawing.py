"""Inputs that the user draws: resized, checked, given to audit and check."""

from __future__ import annotations

import torch
from tests.unit.check.fakes import FakeBackend, FakeGraph

from pytest_cudagraph import audit, inputs
from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.check import check_replays
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.values import Agreement, Disagreement

X, SLOTS = torch.randn(4, 3), torch.arange(4)


def examples(*args, draw, sizes=(2, 4), batch_dim=0, **kwargs):
    made = inputs.batch_examples(Example(args=args, kwargs=kwargs), sizes, batch_dim)
    return inputs.with_draw(made, draw, batch_dim)


def draw_slots(generator):
    return torch.randn(4, 3, generator=generator), torch.randperm(9, generator=generator)[:4]


def test_a_function_draws_equal_values_for_equal_seeds_and_they_are_resized_like_the_example():
    made = examples(X, SLOTS, draw=draw_slots)
    x, slots = draw_slots(torch.Generator().manual_seed(5))
    for size in (2, 4):
        drawn = inputs.fresh(made[size], 5)
        assert torch.equal(drawn.args[0], x[:size])
        assert torch.equal(drawn.args[1], slots[:size])
    assert not torch.equal(inputs.fresh(made[4], 6).args[1], slots)


def test_values_at_the_edges_are_those_of_floats_alone():
    made = examples(X, SLOTS, draw=draw_slots)[4]
    for like in ("zeros", "large", "negative", "permuted"):
        edge = inputs.fresh(made, 5, like=like)
        assert torch.equal(edge.args[1], inputs.fresh(made, 5).args[1])
        assert not torch.equal(edge.args[0], inputs.fresh(made, 5).args[0])


def test_consecutive_seeds_give_each_of_several_examples_and_the_first_one():
    made = examples(X, draw=[X + 1, X + 2])[4]
    found = [inputs.fresh(made, seed).args[0] for seed in (1, 2, 3)]
    assert [torch.equal(one, X + more) for one, more in zip(found, (1, 2, 0), strict=True)] == [True] * 3


def test_keywords_come_as_a_pair_or_alone():
    pair = examples(X, mask=SLOTS > 0, draw=lambda generator: (X + 1, {"mask": SLOTS > 1}), sizes=(4,))[4]
    assert torch.equal(inputs.fresh(pair, 1).kwargs["mask"], SLOTS > 1)
    alone = examples(x=X, draw=[{"x": X + 1}], sizes=(4,))[4]
    assert torch.equal(inputs.fresh(alone, 1).kwargs["x"], X + 1)


class IgnoresTheMask(FakeGraph):
    """A replay with the mask of its capture."""

    def answer(self, x, mask):
        return self.model(x, torch.ones_like(mask))


def masked(x, mask):
    return x * mask


def checked(draw, graph=IgnoresTheMask):
    made = examples(X, torch.ones(4, 1, dtype=torch.bool), draw=draw)
    graphs = {size: graph(masked, batch_size=size) for size in made}
    return check_replays(graphs, lambda _: masked, made, model=masked, backend=FakeBackend(), seed=7)


def test_a_mask_that_a_replay_ignores_is_found_where_it_is_drawn_and_only_there():
    other = X, torch.tensor([[True], [False], [True], [True]])
    for draw in (lambda generator: (X, torch.rand(4, 1, generator=generator) > 0.5), [other]):
        assert isinstance(checked(draw)[4], Disagreement)
        assert isinstance(checked(draw, FakeGraph)[4], Agreement)
    assert isinstance(checked(None)[4], Agreement)


def test_the_check_tries_each_of_several_examples():
    tried = set()

    class Logs(FakeGraph):
        def answer(self, x, mask):
            tried.add(float(x[0, 0]))
            return self.model(x, mask)

    mask = torch.ones(4, 1, dtype=torch.bool)
    checked([(torch.full((4, 3), float(number)), mask) for number in range(10, 16)], Logs)
    assert {10.0, 11.0, 12.0, 13.0, 14.0, 15.0} <= tried


TOLD = []
"""A global: the audit restores what the model holds."""


def told(x, slots):
    TOLD.append(slots)
    return x * slots[:, None]


def test_the_audit_calls_the_model_on_drawn_inputs():
    made = examples(X, SLOTS, draw=lambda generator: (X, SLOTS + 1), sizes=(4,))[4]
    audit.audit(told, made, open_backend("cpu"))
    assert any(slots.tolist() == [1, 2, 3, 4] for slots in TOLD)
