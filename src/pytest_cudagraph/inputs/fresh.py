"""New values for an example, such that the model still takes them."""

from __future__ import annotations

from typing import Literal

import torch

from pytest_cudagraph.inputs.example import Example, filled_like, map_example

Like = Literal["random", "zeros", "negative", "large", "permuted"]

_LARGE_RATIO = 100.0
"""How much wider than the example ``large`` values spread: enough to leave the linear part of activations."""

_MASKED_BELOW = -1000.0
"""Additive masks hold 0 and one number from -1e4 down to -inf; no feature has only such values."""


def fresh(example: Example, seed: int, *, like: Like = "random") -> Example:
    """The same shapes, strides, dtypes, devices and plain values with new tensor values, equal for equal seeds.

    Floats are normal with the example's own mean and spread, within its range, and never NaN. Integers are drawn
    from the example's own range. Booleans, masks and ascending integers (positions, offsets) stay as they are.
    ``zeros`` and ``large`` give floats of 0 and of 100 times the spread, ``negative`` the example's floats with their
    signs changed, ``permuted`` the example's own numbers in another order. torch's own random state stays untouched.
    """
    # On the CPU whatever the device, so that a seed means the same inputs everywhere.
    generator = torch.Generator().manual_seed(seed)
    return map_example(example, lambda tensor: filled_like(tensor, _values(tensor.detach().cpu(), generator, like)))


def _values(tensor: torch.Tensor, generator: torch.Generator, like: Like) -> torch.Tensor:
    # Random booleans would mask whole rows, whose softmax is NaN in eager too: then nothing is compared.
    if tensor.numel() == 0 or tensor.dtype == torch.bool or tensor.is_quantized:
        return tensor
    if tensor.is_complex():
        parts = (tensor.real, tensor.imag)
        real, imag = (_floats(part.double(), tensor.real.dtype, generator, like) for part in parts)
        return torch.complex(real, imag)
    if tensor.is_floating_point():
        return _floats(tensor.double(), tensor.dtype, generator, like)
    return _integers(tensor.to(torch.int64), generator, like)


def _floats(old: torch.Tensor, dtype: torch.dtype, generator: torch.Generator, like: Like) -> torch.Tensor:
    """``old`` and the result in double precision: a mean over half-precision values overflows."""
    usable = old[old.isfinite()]
    if usable.numel() == 0 or is_additive_mask(old):
        return old.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    if like == "zeros":
        new = torch.zeros_like(old)
    elif like == "negative":
        new = -old
    elif like == "permuted":
        new = _permuted(torch.where(old.isfinite(), old, usable[0]), generator)
    else:
        new = _drawn(old, usable, dtype, generator, like)
    return torch.where(old.isinf(), old, new)  # an infinity is a mask among numbers: it stays where it was


def _permuted(old: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return old.flatten()[torch.randperm(old.numel(), generator=generator)].view(old.shape)


def _drawn(
    old: torch.Tensor, usable: torch.Tensor, dtype: torch.dtype, generator: torch.Generator, like: Like
) -> torch.Tensor:
    normal = torch.randn(old.shape, generator=generator, dtype=torch.float64)
    low, high = usable.min().item(), usable.max().item()
    mean, spread = usable.mean().item(), usable.std(correction=0).item()
    if low == high:
        # A lone or constant value (a temperature, an example of ones) tells no spread: vary it, keep its sign.
        low, high = min(low / 2, low * 2), max(high / 2, high * 2)
        mean, spread = (mean, abs(mean) / 4) if mean else (0.0, 1.0)
        low, high = (low, high) if mean else (-3.0, 3.0)
    if like == "large":
        limit = torch.finfo(dtype).max / 16
        spread, low, high = spread * _LARGE_RATIO, -limit, limit
    # Within the example's own range: a probability or a pixel of 0 to 1 stays one, a logarithm keeps its domain.
    return (mean + spread * normal).clamp(low, high)


def is_additive_mask(old: torch.Tensor) -> bool:
    """Whether finite or not, it holds 0 and one very negative number only."""
    low = old.min()
    return bool(low <= _MASKED_BELOW) and bool(((old == 0) | (old == low)).all())


def _integers(old: torch.Tensor, generator: torch.Generator, like: Like) -> torch.Tensor:
    low, high = int(old.min()), int(old.max())
    # Ascending rows are positions or offsets: drawn anew they would repeat, and writes to a cache would collide.
    # Zeros and ones are a mask, see the booleans.
    if low == high or is_ascending(old) or (low, high) == (0, 1):
        return old
    if like == "zeros":
        return torch.full_like(old, low)
    if like == "permuted":
        return _permuted(old, generator)
    above = min(high + 1, torch.iinfo(torch.int64).max)
    return torch.randint(low, above, old.shape, generator=generator, dtype=torch.int64)


def is_ascending(old: torch.Tensor) -> bool:
    """Whether every row of more than one number ascends: positions, offsets."""
    return old.ndim > 0 and old.shape[-1] > 1 and bool((old[..., 1:] >= old[..., :-1]).all())
