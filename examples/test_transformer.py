"""A small transformer encoder: the deeper the stack, the more launches one graph replaces."""

import pytest
import torch
from torch import nn


def make_encoder(layers: int) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(d_model=64, nhead=4, dim_feedforward=128, batch_first=True)
    # Nested tensors read the padding mask on the host, which no capture allows.
    return nn.TransformerEncoder(layer, num_layers=layers, enable_nested_tensor=False).eval()


@pytest.mark.graph_speedup(min=1.15)
@pytest.mark.parametrize("layers", [2, 4])
def test_transformer_encoder(cudagraph, layers):
    cudagraph(make_encoder(layers), torch.randn(1, 8, 64))


@pytest.mark.graph_speedup(min={1: 1.15, 8: 1.0})
def test_gate_per_batch_size(cudagraph):
    """Larger batches are bound by the arithmetic: ask of each batch size what it can give."""
    cudagraph(make_encoder(2), torch.randn(1, 8, 64))
