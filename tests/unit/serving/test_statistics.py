"""What a runner says of itself."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from pytest_cudagraph import FormStatistics, GraphRunner, RunnerStatistics

NOTHING = RunnerStatistics(
    device="cpu", padded=0, hits=0, padding_rows=0, eager={}, forms=(), captures=0, recaptures=0, evictions=0,
    state_changes=0, capture_ns=0,
)  # fmt: skip

MUCH = RunnerStatistics(
    device="cuda:0",
    hits=1_000,
    padded=180,
    padding_rows=212,
    eager={"other argument": 3, "beyond the largest batch size": 20},
    forms=(
        FormStatistics(
            form="args[0] int64 (rows, 5)",
            replays={8: 900, 4: 279, 2: 1},
            memory_bytes={8: 43_000_000, 4: None, 1: 512},
            refused={16: "operation not permitted when stream is capturing (aten.item) at serve.py:12"},
            not_padded="output[1] is 4 with 4 rows, 3 with 3",
        ),
    ),
    captures=6,
    recaptures=2,
    evictions=1,
    state_changes=2,
    capture_ns=1_234_000_000,
)


def test_the_words(golden):
    texts = ["\n".join(found.lines()) for found in (NOTHING, MUCH)]
    golden("runner-statistics.txt", "\n\n".join(texts))


def test_calls_are_all_that_were_served():
    assert MUCH.calls == 1_203
    assert NOTHING.calls == 0


def test_statistics_are_of_one_moment():
    run = GraphRunner(nn.Linear(3, 2), torch.randn(2, 3), device="cpu", batch_sizes=(2,))
    before = run.statistics
    run(torch.randn(2, 3))
    run(torch.randn(9, 3))
    assert (before.calls, before.replays, before.eager) == (0, {}, {})
    assert run.statistics.calls == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.hits = 7
