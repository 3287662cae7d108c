"""The tuner with CUDA graphs: every combination is captured, checked and timed, and the memory of a graph is known."""

from __future__ import annotations

import torch
from torch import nn

from pytest_cudagraph import GraphRunner
from pytest_cudagraph.serving.tuning import tune


def test_a_model_is_tuned_saved_and_served(tmp_path):
    model, x = nn.Sequential(nn.Linear(16, 16), nn.GELU()).cuda().eval(), torch.randn(1, 16, device="cuda")
    report = tune(model, x, batch_sizes=[1, 2], graph=[True, False], time_budget_s=2, name="mlp")
    assert [each.reason for each in report.combinations] == [""] * 4
    assert report.combinations[0].memory_bytes > 0
    only_graphs = tune(model, x, batch_sizes=[1, 2], graph=[True], time_budget_s=2, name="mlp")
    only_graphs.save(tmp_path / "tuned.json")
    with GraphRunner.tuned(tmp_path / "tuned.json", model, x, name="mlp") as run:
        assert run.batch_sizes == (1, 2)
        torch.testing.assert_close(run(x), model(x))
