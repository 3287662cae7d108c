"""Random sequences of captures, replays, refusals, evictions and changes agree with eager and leave no memory."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.gpu.sequences import Failure, quick_collections, run_sequence

PER_TEST = 60


@pytest.fixture(autouse=True)
def _collections_take_no_time():
    with quick_collections():
        yield


@pytest.mark.parametrize("first", range(0, 4 * PER_TEST, PER_TEST))
def test_every_call_agrees_with_eager_and_the_allocator_holds_nothing_afterwards(first):
    tally = Counter()
    for seed in range(first, first + PER_TEST):
        run_sequence(seed, tally)
    rare = {name: tally[name] for name in ("calls compared", "captures", "replays", "refused", "evictions")}
    assert all(rare.values()), rare


@pytest.mark.parametrize(
    ("target", "fault", "seed", "found"),
    [
        ("model_watch.ModelWatch.has_changed", lambda watch: False, 27, "not close"),
        ("backends.cuda.backend.generators_of", lambda device, *roots: [], 12, "not close"),
        ("backends.cuda.recording._reset_returns_share", lambda gpu: True, 8, "segments of graphs"),
    ],
)
def test_a_planted_fault_is_found(monkeypatch, target, fault, seed, found):
    monkeypatch.setattr(f"pytest_cudagraph.{target}", fault)
    with pytest.raises(Failure, match=found):
        run_sequence(seed, Counter())
