"""Models small enough to be read beside the test that uses them."""

from __future__ import annotations

import itertools

import torch
from torch import nn


class Mlp(nn.Module):
    """Some ten kernels on (batch, features)."""

    def __init__(self, features: int = 64, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        widths = [features, *[width] * depth]
        self.layers = nn.ModuleList(nn.Linear(one, two) for one, two in itertools.pairwise(widths))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return self.head(self.norm(x))


class LeavesItsOutputUnwritten(nn.Module):
    """Right in eager; what is captured never writes the first output, so a replay shows whatever lies there."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty_like(x)
        if not torch.cuda.is_current_stream_capturing():
            torch.mul(x, 2, out=out)
        return out, x + 1


class ReadsTheHost(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        largest = x.abs().max().item()
        return x / largest


class Counts(nn.Module):
    """Moves a buffer and a parameter on at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        self.mean.lerp_(x.mean(0), 0.1)
        return x + self.mean
