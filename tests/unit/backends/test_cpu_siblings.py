"""Graphs of one pool share memory on CUDA: on the twin a replay spoils what its siblings have answered."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_cudagraph import GraphRunner
from pytest_cudagraph.backends.cpu import CpuBackend


@pytest.fixture
def pool():
    with CpuBackend().pool() as pool:
        yield pool


@pytest.fixture
def fills(monkeypatch):
    """Every graph that was spoiled, in order."""
    from pytest_cudagraph.backends.cpu.graph import CpuGraph

    spoiled = []
    spoil = CpuGraph._spoil
    monkeypatch.setattr(CpuGraph, "_spoil", lambda graph: (spoiled.append(graph), spoil(graph))[1])
    return spoiled


def capture(pool, model, rows):
    return pool.capture(model, (torch.ones(rows, 2),), {}, batch_size=rows)


def test_an_answer_kept_across_the_replay_of_another_batch_size_is_spoiled(pool):
    four, two = (capture(pool, lambda x: (x * 2, x > 0, x.int()), rows) for rows in (4, 2))
    kept = four(torch.full((4, 2), 3.0))
    assert kept[0].eq(6).all()
    two(torch.ones(2, 2))
    assert kept[0].isnan().all()
    assert kept[1].all()
    assert kept[2].eq(torch.iinfo(torch.int32).max).all()


def test_a_copy_of_an_answer_outlives_the_replay_of_another_batch_size(pool):
    four, two = (capture(pool, lambda x: x * 2, rows) for rows in (4, 2))
    kept = four(torch.full((4, 2), 3.0)).clone()
    two(torch.ones(2, 2))
    assert kept.eq(6).all()


def test_graphs_answer_in_any_order_when_each_answer_is_read_at_once(pool):
    model = nn.Linear(2, 2).eval()
    graphs = {rows: capture(pool, model, rows) for rows in (8, 4, 2, 1)}
    first = {rows: graphs[rows](torch.ones(rows, 2)).clone() for rows in graphs}
    for rows in (2, 8, 1, 1, 4, 2, 8):
        assert torch.equal(graphs[rows](torch.ones(rows, 2)), first[rows])


def test_replays_of_one_graph_spoil_nothing_and_a_change_of_graph_spoils_the_last_alone(pool, fills):
    eight, four, two = (capture(pool, lambda x: x * 2, rows) for rows in (8, 4, 2))
    for _ in range(3):
        two(torch.ones(2, 2))
    assert fills == []
    four(torch.ones(4, 2))
    four(torch.ones(4, 2))
    assert fills == [two]
    eight(torch.ones(8, 2))
    assert fills == [two, four]


def test_inputs_and_parameters_among_outputs_are_not_the_pools_to_spoil(pool):
    weight = nn.Parameter(torch.ones(2))
    four, two = (capture(pool, lambda x: (x, weight, x * weight), rows) for rows in (4, 2))
    given, parameter, made = four(torch.full((4, 2), 3.0))
    two(torch.ones(2, 2))
    assert given.eq(3).all()
    assert parameter.eq(1).all()
    assert made.isnan().all()


def test_a_poisoned_graph_still_takes_its_turn(pool):
    four, two = (capture(pool, lambda x: x * 2, rows) for rows in (4, 2))
    kept = four(torch.ones(4, 2))
    two.poison()
    assert kept.eq(2).all()
    two(torch.ones(2, 2))
    assert kept.isnan().all()


def test_graphs_of_other_pools_and_closed_ones_are_left_alone(pool):
    with CpuBackend().pool() as other:
        mine, theirs = capture(pool, lambda x: x * 2, 2), capture(other, lambda x: x * 2, 2)
        kept = mine(torch.ones(2, 2))
        theirs(torch.ones(2, 2))
        assert kept.eq(2).all()
    sibling = capture(pool, lambda x: x * 2, 4)
    mine.close()
    sibling(torch.ones(4, 2))
    assert kept.eq(2).all()


@pytest.mark.parametrize("clone", [True, False])
def test_the_runner_keeps_its_promise_about_outputs(clone):
    with GraphRunner(
        nn.Linear(2, 2).eval(), torch.ones(2, 2), batch_sizes=(2, 4), device="cpu", clone_outputs=clone
    ) as run:
        kept = run(torch.ones(4, 2))
        run(torch.ones(2, 2))
        assert kept.isfinite().all() == clone
