"""Sizes that keep a GPU busy for a while, or fill much of its memory."""

from __future__ import annotations

import torch

from pytest_cudagraph.values import is_emulated

_SHARE = 4
"""An emulated device computes on the CPU: a quarter of the side of a matrix is a 64th of its products."""


def on_emulated_device() -> bool:
    """Whether the CUDA device of this machine is emulated."""
    return torch.cuda.is_available() and is_emulated(torch.cuda.get_device_name())


def large(size: int) -> int:
    """``size`` on a GPU, and a quarter of it on an emulated device."""
    return size // _SHARE if on_emulated_device() else size
