"""Rank models of one task by their measured latencies: each eagerly and by its graph, at two batch sizes."""

import pytest
import torch
from torch import nn

MODELS = {
    "narrow": lambda: nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10)),
    "wide": lambda: nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 10)),
    "deep": lambda: nn.Sequential(nn.Linear(64, 32), *[nn.Linear(32, 32) for _ in range(12)], nn.Linear(32, 10)),
}


@pytest.mark.workload(group="classifier")
@pytest.mark.graph_speedup(min=0.5, batch_sizes=[1, 32])
@pytest.mark.parametrize("name", MODELS)
def test_classifier(cudagraph, name):
    cudagraph(MODELS[name]().to(cudagraph.device).eval(), torch.randn(1, 64, device=cudagraph.device))
