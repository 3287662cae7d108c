"""A small convolutional network in evaluation mode: batch normalisation reads its statistics and writes nothing.

Few channels and a small image on purpose: convolutions soon take longer than what surrounds them, and a graph removes
only the latter. With 16 channels at 32 pixels the same network gains a few percent on a CPU.
"""

import pytest
import torch
from torch import nn


class SmallCnn(nn.Module):
    def __init__(self, channels: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, channels, 3, stride=2, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.BatchNorm2d(2 * channels),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
        )
        self.head = nn.Sequential(nn.Linear(2 * channels, 2 * channels), nn.ReLU(), nn.Linear(2 * channels, classes))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(image).flatten(1))


@pytest.mark.graph_speedup(min=1.15)
def test_cnn(cudagraph):
    cudagraph(SmallCnn().eval(), torch.randn(1, 3, 16, 16))
