"""Change tensors in place and bring back every bit. Large ones are changed reversibly, because a copy needs memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from pytest_cudagraph.state.storages import SMALL_BYTES

_CHANGE_RATIO = 0.05
"""Far above the rounding of any dtype, and still a plausible weight."""

_FROM_ZERO = 0.01
"""Replaces 0, which no factor changes. Biases and gammas often start at 0."""

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_PERIOD = 1021
"""The factors repeat after so many elements. No power of two, so that rows of a matrix get other factors."""

_LOWEST_BIT = 6
"""The reversible change flips two bits of the mantissa, the lower one worth 2**-6 of the value (1.6 %)."""


@contextmanager
def changed(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Change floating tensors inside: each element by another factor near 1, zeros to small values."""
    with ExitStack() as undo:
        for tensor in tensors:
            undo.callback(_change(torch.view_as_real(tensor) if tensor.is_complex() else tensor))
        yield


def _change(tensor: torch.Tensor) -> Callable[[], object]:
    """Change one tensor. Return what undoes this."""
    tensor = tensor.detach()
    flat = _flat(tensor) if tensor.nbytes > SMALL_BYTES else None
    if flat is None:
        return _multiply(tensor)
    # Most tensors are not zero from the start, and to read one whole takes as long as to change it.
    if flat[:_PERIOD].any() or flat.any():
        masks = _masks(tensor)
        _each_period(masks, flat, torch.Tensor.bitwise_xor_)
        return lambda: _each_period(masks, flat, torch.Tensor.bitwise_xor_)
    _each_period(tensor.new_tensor(_FROM_ZERO) * _wave(tensor), flat.view(tensor.dtype), torch.Tensor.copy_)
    return flat.zero_


def _multiply(tensor: torch.Tensor) -> Callable[[], object]:
    before = tensor.clone()
    wave = torch.arange(tensor.numel(), device=tensor.device, dtype=torch.float32).cos().view(tensor.shape)
    tensor.copy_(torch.where(tensor == 0, _FROM_ZERO * wave, tensor * (1 + _CHANGE_RATIO * wave)))
    return lambda: tensor.copy_(before)


def _flat(tensor: torch.Tensor) -> torch.Tensor | None:
    """The bits of a tensor as one row of integers in the same memory. None if the memory has gaps."""
    in_order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    dense = tensor.permute(in_order)
    return dense.view(-1).view(_INTEGERS[tensor.itemsize]) if dense.is_contiguous() else None


def _masks(tensor: torch.Tensor) -> torch.Tensor:
    """One or two bits of the mantissa for each element. To flip them twice changes nothing."""
    mantissa_bits = -round(math.log2(torch.finfo(tensor.dtype).eps))
    low = 1 << (mantissa_bits - _LOWEST_BIT)
    masks = torch.tensor([low, 2 * low, 3 * low], dtype=_INTEGERS[tensor.itemsize], device=tensor.device)
    return masks[torch.arange(_PERIOD, device=tensor.device) % len(masks)]


def _wave(tensor: torch.Tensor) -> torch.Tensor:
    return torch.arange(_PERIOD, device=tensor.device, dtype=torch.float32).cos().to(tensor.dtype)


def _each_period(
    pattern: torch.Tensor, row: torch.Tensor, write: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """Combine a long row with a pattern that repeats."""
    whole = row.numel() // _PERIOD * _PERIOD
    write(row[:whole].view(-1, _PERIOD), pattern)
    write(row[whole:], pattern[: row.numel() - whole])
