"""Two tensors, bit by bit."""

from __future__ import annotations

import torch


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors are alike to the last bit, NaN payloads and the sign of zero included."""
    if kind_of(first) != kind_of(second) or first.shape != second.shape:
        return False
    return torch.equal(_bits(first), _bits(second))


def kind_of(tensor: torch.Tensor) -> tuple[torch.dtype, torch.device, torch.layout]:
    """What two tensors must share for their values to be compared at all."""
    return tensor.dtype, tensor.device, tensor.layout


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    # Viewing a quantized tensor as bytes ends the process.
    tensor = tensor.int_repr() if tensor.is_quantized else tensor
    tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
