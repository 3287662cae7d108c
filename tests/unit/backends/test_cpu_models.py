"""Replays of the CPU twin give the same bits as eager, for the families of models people serve."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from pytest_cudagraph import pytree
from pytest_cudagraph.backends.cpu import CpuBackend


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(8, 10)

    def forward(self, image):
        return self.head(self.features(image))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers = kind(16, 32, 2, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, sequence):
        steps, state = self.layers(sequence)
        return {"scores": self.head(steps[:, -1]), "state": state}


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.mix(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(50, 32), nn.Embedding(16, 32)
        self.blocks = nn.Sequential(Block(32, 4), Block(32, 4))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 50, bias=False)

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


class Attention(nn.Module):
    """Attention by hand: matmul, softmax, masks, views that are copies."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(16, 48)
        self.register_buffer("mask", torch.ones(6, 6, dtype=torch.bool).tril())

    def forward(self, x):
        query, key, value = self.mix(x).chunk(3, dim=-1)
        scores = (query @ key.transpose(1, 2) / 4.0).masked_fill(~self.mask, float("-inf"))
        mixed = torch.softmax(scores.float(), dim=-1).to(x.dtype) @ value
        return mixed.transpose(1, 2).contiguous().view(x.shape[0], -1), mixed.sum(), torch.cat([query, key], dim=-1)


def floats(*shape):
    return lambda batch: torch.randn(batch, *shape)


def tokens(batch):
    return torch.randint(0, 50, (batch, 8))


def encoder():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval()


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).eval(), floats(64)),
    "mlp-bf16": (lambda: nn.Sequential(nn.Linear(64, 64), nn.SiLU()).bfloat16(), lambda b: floats(64)(b).bfloat16()),
    "conv-eval": (lambda: ConvNet().eval(), floats(3, 12, 12)),
    "conv-train": (lambda: ConvNet().train(), floats(3, 12, 12)),
    "encoder": (encoder, floats(8, 32)),
    "lstm": (lambda: Recurrent(nn.LSTM).eval(), floats(7, 16)),
    "gru": (lambda: Recurrent(nn.GRU).eval(), floats(7, 16)),
    "gpt": (lambda: Gpt().eval(), tokens),
    "attention": (lambda: Attention().eval(), floats(6, 16)),
    "dropout-train": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).train(), floats(8)),
    "embedding-bag": (lambda: nn.EmbeddingBag(50, 8, mode="mean").eval(), tokens),
}


def same_bits(found, wanted):
    pairs = zip(pytree.tensors_in(found), pytree.tensors_in(wanted), strict=True)
    return all(torch.equal(a, b) and a.stride() == b.stride() for a, b in pairs)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_replay_gives_the_bits_of_eager(name, batch_size):
    make, example = MODELS[name]
    model = make()
    backend = CpuBackend()
    with backend.pool() as pool:
        graph = pool.capture(model, (example(batch_size),), {}, batch_size=batch_size)
        eager = copy.deepcopy(model)
        for seed in range(3):
            given = example(batch_size)
            graph.poison()
            torch.manual_seed(seed)
            found = graph(given)
            torch.manual_seed(seed)
            with backend.running():
                wanted = eager(given)
            assert same_bits(found, wanted)
            assert same_bits(model.state_dict(), eager.state_dict())


def test_the_encoder_keeps_its_fast_path():
    with CpuBackend().pool() as pool:
        graph = pool.capture(encoder(), (torch.randn(2, 8, 32),), {}, batch_size=2)
    assert graph.receipt.kernel_names == {"aten._transformer_encoder_layer_fwd": 2}


def test_views_cost_no_kernel_and_kernels_are_counted_by_name():
    def model(x):
        return (x.view(-1).unsqueeze(0) + 1).relu().t_().reshape(2, 2) * 2

    with CpuBackend().pool() as pool:
        receipt = pool.capture(model, (torch.randn(4),), {}, batch_size=4).receipt
    assert (receipt.operations, receipt.kernels) == (7, 3)
    assert receipt.kernel_names == {"aten.add": 1, "aten.relu": 1, "aten.mul": 1}
    assert receipt.opaque_regions == 0
    assert receipt.capture_ns > 0
    assert receipt.memory_bytes == 4 * 16


TRANSFORMERS = {
    "llama": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"num_key_value_heads": 2, "intermediate_size": 64, "use_cache": False},
    ),
    "bert": ("BertConfig", "BertModel", {"intermediate_size": 64}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"use_cache": False}),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_replay_gives_the_bits_of_eager_for_models_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    config, model_class, extra = TRANSFORMERS[name]
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = getattr(transformers, model_class)(getattr(transformers, config)(**sizes, **extra)).eval()
    backend = CpuBackend()
    with backend.pool() as pool:
        graph = pool.capture(model, (tokens(2),), {}, batch_size=2)
        for _ in range(2):
            given = tokens(2)
            graph.poison()
            found = graph(given)
            with backend.running():
                wanted = model(given)
            assert type(found) is type(wanted)
            assert same_bits(found, wanted)
