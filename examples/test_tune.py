"""Find the best batch size for a model, with and without a graph, and serve it from the saved result."""

import torch
from torch import nn

from pytest_cudagraph import GraphRunner


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)).eval()


def test_tune_and_serve(tune, cudagraph, tmp_path):
    model, x = make_model().to(cudagraph.device), torch.randn(1, 64, device=cudagraph.device)
    report = tune(model, x, batch_sizes=[1, 4], name="classifier")
    print("\n".join(report.lines()))
    if report.best is None:  # without --cudagraph nothing is measured
        return
    assert report.best.combination.batch_size == 4  # four rows take hardly longer than one
    report.save(tmp_path / "tuned.json")
    with GraphRunner.tuned(tmp_path / "tuned.json", model, x, name="classifier", device=x.device.type) as run:
        assert run(x).shape == (1, 10)
