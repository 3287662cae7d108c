"""Graphs of one pool share memory on CUDA: on the twin a replay overwrites the outputs of the others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_cudagraph import GraphRunner
from pytest_cudagraph.backends.cpu import CpuBackend


def capture(twin, model, rows):
    return twin.capture(model, (torch.ones(rows, 2),), {}, batch_size=rows)


def test_an_output_kept_across_the_replay_of_another_batch_size_is_overwritten(twin):
    four, two = (capture(twin, lambda x: (x * 2, x > 0, x.int()), rows) for rows in (4, 2))
    kept = four(torch.full((4, 2), 3.0))
    assert kept[0].eq(6).all()
    two(torch.ones(2, 2))
    assert kept[0].isnan().all()
    assert kept[1].all()
    assert kept[2].eq(torch.iinfo(torch.int32).max).all()


def test_a_copy_of_an_output_outlives_the_replay_of_another_batch_size(twin):
    four, two = (capture(twin, lambda x: x * 2, rows) for rows in (4, 2))
    kept = four(torch.full((4, 2), 3.0)).clone()
    two(torch.ones(2, 2))
    assert kept.eq(6).all()


def test_graphs_replay_in_any_order_when_each_output_is_read_at_once(twin):
    model = nn.Linear(2, 2).eval()
    graphs = {rows: capture(twin, model, rows) for rows in (8, 4, 2, 1)}
    first = {rows: graphs[rows](torch.ones(rows, 2)).clone() for rows in graphs}
    for rows in (2, 8, 1, 1, 4, 2, 8):
        assert torch.equal(graphs[rows](torch.ones(rows, 2)), first[rows])


@torch.inference_mode()
def test_replays_of_one_graph_overwrite_nothing_and_a_change_of_graph_overwrites_the_last_alone(twin):
    graphs = [capture(twin, lambda x: x * 2, rows) for rows in (8, 4, 2)]
    eight, four, two = (graph(torch.ones(rows, 2)) for graph, rows in zip(graphs, (8, 4, 2), strict=True))
    for output in (eight, four):
        output.fill_(0)
    for _ in range(3):
        graphs[2](torch.ones(2, 2))
        assert (eight.sum(), four.sum()) == (0, 0)
    graphs[1](torch.ones(4, 2))
    assert two.isnan().all()
    two.fill_(0)
    graphs[1](torch.ones(4, 2))
    graphs[0](torch.ones(8, 2))
    assert four.isnan().all()
    assert two.sum() == 0


def test_inputs_and_parameters_among_outputs_are_never_overwritten(twin):
    weight = nn.Parameter(torch.ones(2))
    four, two = (capture(twin, lambda x: (x, weight, x * weight), rows) for rows in (4, 2))
    given, parameter, made = four(torch.full((4, 2), 3.0))
    two(torch.ones(2, 2))
    assert given.eq(3).all()
    assert parameter.eq(1).all()
    assert made.isnan().all()


def test_a_poisoned_graph_still_overwrites_the_outputs_of_the_last(twin):
    four, two = (capture(twin, lambda x: x * 2, rows) for rows in (4, 2))
    kept = four(torch.ones(4, 2))
    two.poison()
    assert kept.eq(2).all()
    two(torch.ones(2, 2))
    assert kept.isnan().all()


def test_graphs_of_other_pools_and_closed_ones_are_left_alone(twin):
    with CpuBackend().pool() as other:
        mine, theirs = capture(twin, lambda x: x * 2, 2), capture(other, lambda x: x * 2, 2)
        kept = mine(torch.ones(2, 2))
        theirs(torch.ones(2, 2))
        assert kept.eq(2).all()
    sibling = capture(twin, lambda x: x * 2, 4)
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
