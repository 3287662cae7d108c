"""A small Llama-like decoder with random weights, written for graphs.

The cache has a fixed length, and the position of each row is a tensor on the device. So one graph serves every step.
"""

import torch
import torch.nn.functional as F
from torch import nn


class SmallDecoder(nn.Module):
    """The interface that ``decode_engine`` takes: ``length``, a call for tokens, ``reset()`` and ``rewind(count)``."""

    def __init__(
        self, rows=4, length=64, vocabulary=96, hidden=32, heads=4, kv_heads=2, inner=64, layers=2, last_only=False
    ):
        super().__init__()
        self.length, self.last_only = length, last_only
        self.embed = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Layer(rows, length, hidden, heads, kv_heads, inner) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)
        angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, hidden // heads, 2) / (hidden // heads))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.register_buffer("slots", torch.arange(length))
        self.register_buffer("rows", torch.arange(rows)[:, None])
        self.register_buffer("position", torch.zeros(rows, dtype=torch.int64))
        with torch.no_grad():
            for weight in self.parameters():
                if weight.ndim > 1:
                    weight.normal_(0, 0.3)  # with torch's small weights every prompt gives the same token

    def forward(self, tokens):
        rows, count = tokens.shape
        slots = self.position[:rows, None] + self.slots[:count]
        mask = (self.slots <= slots[..., None])[:, None]
        cos, sin = self.cos[slots][:, :, None], self.sin[slots][:, :, None]
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden, self.rows[:rows], slots, mask, cos, sin)
        self.position[:rows] += count
        return self.head(self.norm(hidden[:, -1:] if self.last_only else hidden))

    def reset(self):
        self.position.zero_()

    def rewind(self, count):
        self.position -= count


class Layer(nn.Module):
    def __init__(self, rows, length, hidden, heads, kv_heads, inner):
        super().__init__()
        size = hidden // heads
        self.heads = [heads, kv_heads, kv_heads]
        self.norm, self.norm_inner = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.project = nn.Linear(hidden, sum(self.heads) * size, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 2 * inner, bias=False), nn.Linear(inner, hidden, bias=False)
        self.register_buffer("keys", torch.zeros(rows, length, kv_heads, size))
        self.register_buffer("values", torch.zeros(rows, length, kv_heads, size))

    def forward(self, hidden, rows, slots, mask, cos, sin):
        batch, count, _ = hidden.shape
        projected = self.project(self.norm(hidden)).view(batch, count, sum(self.heads), -1)
        query, key, value = projected.split(self.heads, 2)
        self.keys[rows, slots] = rotate(key, cos, sin)
        self.values[rows, slots] = value
        attended = F.scaled_dot_product_attention(
            rotate(query, cos, sin).transpose(1, 2),
            self.keys[:batch].transpose(1, 2),
            self.values[:batch].transpose(1, 2),
            attn_mask=mask,
            enable_gqa=True,
        )
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(batch, count, -1))
        gate, up = self.up(self.norm_inner(hidden)).chunk(2, -1)
        return hidden + self.down(F.silu(gate) * up)


def rotate(values, cos, sin):
    """Rotary position embedding of (rows, tokens, heads, size)."""
    first, second = values.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
