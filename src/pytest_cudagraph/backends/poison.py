"""What no model would answer: the values output buffers hold until a replay has written them."""

from __future__ import annotations

import torch


def poison(tensor: torch.Tensor) -> None:
    """Fill with NaN; integers with their largest value, booleans with True, for want of a NaN."""
    with torch.inference_mode():
        tensor.fill_(poison_value(tensor.dtype))


def poison_value(dtype: torch.dtype) -> float | int | bool:
    """The sentinel of one dtype."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max
