"""What a GPU's kernel would not survive is asked before it runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_cudagraph.backends.device_asserts import TrapGuard, WouldTrapError

TABLE, SCORES = torch.zeros(3, 2), torch.zeros(2, 3)
FINE, OUTSIDE = torch.tensor([0, 2]), torch.tensor([0, 3])
NAN = torch.tensor([0.5, torch.nan])

TRAPS = {
    "embedding": lambda: nn.functional.embedding(OUTSIDE, TABLE),
    "embedding, negative": lambda: nn.functional.embedding(torch.tensor([-1]), TABLE),
    "embedding_bag": lambda: nn.functional.embedding_bag(OUTSIDE, TABLE, torch.tensor([0])),
    "index": lambda: TABLE[OUTSIDE],
    "index behind a mask": lambda: torch.zeros(2, 2, 3)[torch.ones(2, 2, dtype=torch.bool), torch.full((4,), 3)],
    "index_put": lambda: TABLE.clone().index_put_((OUTSIDE,), torch.ones(2, 2)),
    "index_select": lambda: TABLE.index_select(0, OUTSIDE),
    "index_add": lambda: TABLE.clone().index_add_(0, OUTSIDE, torch.ones(2, 2)),
    "index_copy": lambda: TABLE.clone().index_copy_(0, OUTSIDE, torch.ones(2, 2)),
    "gather": lambda: TABLE.gather(0, OUTSIDE[:, None]),
    "scatter": lambda: TABLE.clone().scatter_(0, OUTSIDE[:, None], 1.0),
    "scatter_add": lambda: TABLE.scatter_add(0, OUTSIDE[:, None], torch.ones(2, 2)),
    "take": lambda: TABLE.take(torch.tensor([6])),
    "one_hot": lambda: torch.zeros(2, 3).scatter_(1, OUTSIDE[:, None], 1),
    "nll_loss": lambda: nn.functional.nll_loss(SCORES, OUTSIDE),
    "multinomial": lambda: torch.multinomial(NAN, 1),
    "multinomial of nothing": lambda: torch.multinomial(torch.zeros(3), 1),
    "bernoulli": lambda: torch.bernoulli(NAN),
    "bernoulli in place": lambda: torch.zeros(2).bernoulli_(NAN),
    "binary_cross_entropy": lambda: nn.functional.binary_cross_entropy(torch.tensor([1.5]), torch.tensor([1.0])),
    "assertion": lambda: torch._assert_async(torch.tensor(False)),
}

SURVIVES = {
    "embedding": lambda: nn.functional.embedding(FINE, TABLE),
    "embedding_bag": lambda: nn.functional.embedding_bag(FINE, TABLE, torch.tensor([0])),
    "index, from the end": lambda: TABLE[torch.tensor([-3, 2])],
    "index by mask": lambda: TABLE[torch.tensor([True, False, True])],
    "index in the second dimension": lambda: TABLE[:, torch.tensor([0, 1])],
    "index_put": lambda: TABLE.clone().index_put_((FINE,), torch.ones(2, 2)),
    "gather": lambda: TABLE.gather(0, FINE[:, None]),
    "gather of nothing": lambda: TABLE.gather(0, torch.zeros(0, 2, dtype=torch.int64)),
    "take": lambda: TABLE.take(torch.tensor([-6, 5])),
    "nll_loss, ignored": lambda: nn.functional.nll_loss(SCORES, torch.tensor([2, -100])),
    "multinomial": lambda: torch.multinomial(torch.tensor([0.5, 0.5]), 1),
    "bernoulli": lambda: torch.bernoulli(torch.tensor([0.0, 1.0])),
    "bernoulli by number": lambda: torch.zeros(2).bernoulli_(0.5),
    "binary_cross_entropy": lambda: nn.functional.binary_cross_entropy(torch.tensor([0.5]), torch.tensor([1.0])),
    "assertion": lambda: torch._assert_async(torch.tensor(True)),
    "arithmetic on NaN": lambda: NAN * 2 + NAN.sum(),
}


@pytest.mark.parametrize("call", TRAPS.values(), ids=TRAPS.keys())
def test_what_would_trap_is_not_run(call):
    with TrapGuard(), pytest.raises(WouldTrapError, match="would trap"):
        call()


@pytest.mark.parametrize("call", SURVIVES.values(), ids=SURVIVES.keys())
def test_what_is_within_bounds_runs(call):
    with TrapGuard():
        call()


def test_an_operator_that_nobody_knows_is_not_run():
    @torch.library.custom_op("traps_test::opaque", mutates_args=())
    def opaque(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    with TrapGuard(), pytest.raises(WouldTrapError, match="traps_test::opaque cannot be checked"):
        opaque(NAN)
