"""How long the operations of a graph take by themselves, on the twin."""

from __future__ import annotations

import torch
from torch import nn

from pytest_cudagraph.backends.cpu import CpuBackend, graph
from pytest_cudagraph.protocols import MeasuresBusyTime


def test_each_step_counts_and_looking_at_the_clock_does_not(monkeypatch):
    now = [0]

    def look():
        now[0] += 50
        return now[0]

    def step():
        now[0] += 1000

    monkeypatch.setattr(graph.time, "perf_counter_ns", look)
    assert graph.operations_ns([step] * 3) == 3000


def test_a_graph_tells_it_by_a_replay_of_its_own():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    example = torch.randn(2, 8)
    with CpuBackend().pool() as pool:
        graph = pool.capture(model, (example,), {}, batch_size=2)
        assert isinstance(graph, MeasuresBusyTime)
        found = graph(example)
        graph.poison()
        graph(example)
        assert graph.busy_ns() > 0
        with torch.inference_mode():
            assert torch.equal(found, model(example))
