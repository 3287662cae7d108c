"""A small classifier: where launch overhead is most of the latency, and so a graph gains most.

The layers are small on purpose. What a graph removes is the time per operation that is spent outside of it (Python and
dispatch on a CPU, launches on a GPU), and that is a large share only while the operations themselves are short.
"""

import pytest
import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self, features: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(features, 64),
            nn.ReLU(),
            nn.Linear(64, 64),
            nn.ReLU(),
            nn.Linear(64, classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).softmax(dim=-1)


@pytest.mark.graph_speedup(min=1.15)
def test_linear_classifier(cudagraph):
    report = cudagraph(Classifier().eval(), torch.randn(1, 64))
    if not report.batches:
        pytest.skip("the model has run once, and nothing was measured: add --cudagraph")
    assert [batch.batch_size for batch in report.batches] == [1, 2, 4, 8]
