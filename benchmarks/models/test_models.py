"""The suite of this project: seven models, eagerly, compiled, by graphs, and both, at the run's batch sizes.

    python -m pytest benchmarks/models --cudagraph --cudagraph-json=run.json
    pytest-cudagraph suite run.json

Needs transformers, and downloads nothing: weights are random. Select with ``-k "vit and not inductor"``. Nothing here
fails for its speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks.models.definitions import DecodeStep, Part
from torch import nn

transformers = pytest.importorskip("transformers")

Made = tuple[nn.Module, torch.Tensor]
TOKENS = 64


def mlp() -> Made:
    layers = [nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(*layers), torch.randn(1, 784)


def cnn() -> Made:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10)), torch.randn(1, 3, 32, 32)


class BasicBlock(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()),
            *(nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.body(x) + self.shortcut(x)).relu()


def resnet18() -> Made:
    """He et al. 2015, table 1: two basic blocks at each of four widths."""
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    widths = (64, 64, 128, 256, 512)
    stages = [
        block
        for stage in range(4)
        for block in (
            BasicBlock(widths[stage], widths[stage + 1], 2 if stage else 1),
            BasicBlock(widths[stage + 1], widths[stage + 1], 1),
        )
    ]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)]
    return nn.Sequential(*stem, *stages, *head), torch.randn(1, 3, 224, 224)


def vit_tiny() -> Made:
    config = transformers.ViTConfig(hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768)
    return Part(transformers.ViTModel(config), "last_hidden_state"), torch.randn(1, 3, 224, 224)


def bert_tiny() -> Made:
    config = transformers.BertConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512)
    return Part(transformers.BertModel(config), "last_hidden_state"), torch.randint(0, config.vocab_size, (1, TOKENS))


def gpt2_small() -> Made:
    config = transformers.GPT2Config()
    tokens = torch.randint(0, config.vocab_size, (1, TOKENS))
    return Part(transformers.GPT2LMHeadModel(config), "logits", use_cache=False), tokens


GROUPS: dict[str, dict[str, Callable[[], Made]]] = {
    "images": {"cnn": cnn, "resnet18": resnet18, "vit-tiny": vit_tiny},
    "tokens": {"bert-tiny": bert_tiny, "gpt2-small": gpt2_small},
    "vectors": {"mlp": mlp},
}
CASES = [
    pytest.param(make, id=name, marks=pytest.mark.workload(group=group, name=name))
    for group, models in GROUPS.items()
    for name, make in models.items()
]
pytestmark = [
    pytest.mark.graph_speedup(min=0.01),
    pytest.mark.parametrize("compile", ["none", "inductor"]),
]


@pytest.mark.parametrize("make", CASES)
def test_model(cudagraph: Any, make: Callable[[], Made], compile: str) -> None:
    model, x = make()
    cudagraph(model.eval().requires_grad_(False).to(cudagraph.device), x.to(cudagraph.device), compile=compile)


@pytest.mark.workload(group="decode steps", name="llama")
@pytest.mark.parametrize("rows", [1, 8])
def test_llama_decode(cudagraph: Any, rows: int, compile: str) -> None:
    """One token for each row, with a static cache. The cache has one batch size."""
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=256,
    )  # fmt: skip
    step = DecodeStep(config, rows, cudagraph.device, torch.float32).requires_grad_(False)
    cudagraph(
        step, torch.ones(rows, 1, dtype=torch.int64, device=cudagraph.device), batch_sizes=[rows], compile=compile
    )
