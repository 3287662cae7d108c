"""New values for an example: random values that the model accepts, and edge cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch

from pytest_cudagraph import pytree
from pytest_cudagraph.inputs.example import Example, filled_like, map_example

Like = Literal["random", "zeros", "negative", "large", "permuted"]

_LARGE_RATIO = 100.0
"""The spread of ``large`` values relative to the example: far outside the linear part of activations."""

_MASKED_BELOW = -1000.0
"""Additive masks hold 0 and one number from -1e4 down to -inf. No feature has only such values."""


def fresh(example: Example, seed: int, *, like: Like = "random") -> Example:
    """New tensor values for an example, equal for equal seeds. All else stays: shapes, strides, dtypes, plain values.

    Floats are normal with the example's mean and spread, within its range, and never NaN. Integers are drawn from the
    example's range. Booleans, masks and ascending integers (positions, offsets) do not change. ``zeros`` and ``large``
    give floats of 0 and of 100 times the spread, ``negative`` changes signs, ``permuted`` changes the order. torch's
    random generators do not change.

    Where the user draws the values, these are the new ones, and only floats change for ``zeros`` and the others.
    """
    # Always on the CPU, so that a seed gives the same inputs on every device.
    generator = torch.Generator().manual_seed(seed)
    if example.drawing is None:
        return map_example(example, lambda tensor: filled_like(tensor, _values(tensor.detach().cpu(), generator, like)))
    drawn = example.drawing.call(seed)
    if like == "random":
        return drawn
    return map_example(drawn, lambda tensor: filled_like(tensor, _floats_of(tensor.detach().cpu(), generator, like)))


def _floats_of(tensor: torch.Tensor, generator: torch.Generator, like: Like) -> torch.Tensor:
    is_inexact = tensor.is_floating_point() or tensor.is_complex()
    return _values(tensor, generator, like) if is_inexact else tensor


def _values(tensor: torch.Tensor, generator: torch.Generator, like: Like) -> torch.Tensor:
    # Random booleans could mask whole rows. Their softmax is NaN in eager too, and then nothing is compared.
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
    """Double precision in and out, because a mean over half-precision values overflows."""
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
    return torch.where(old.isinf(), old, new)  # an infinity is a mask: keep it


def _permuted(old: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return old.flatten()[torch.randperm(old.numel(), generator=generator, device="cpu")].view(old.shape)


def _drawn(
    old: torch.Tensor, usable: torch.Tensor, dtype: torch.dtype, generator: torch.Generator, like: Like
) -> torch.Tensor:
    normal = torch.randn(old.shape, generator=generator, dtype=torch.float64, device="cpu")
    low, high = usable.min().item(), usable.max().item()
    mean, spread = usable.mean().item(), usable.std(correction=0).item()
    if low == high:
        # A constant (a temperature, an example of ones) shows no spread. Vary it, but keep its sign.
        low, high = min(low / 2, low * 2), max(high / 2, high * 2)
        mean, spread = (mean, abs(mean) / 4) if mean else (0.0, 1.0)
        low, high = (low, high) if mean else (-3.0, 3.0)
    if like == "large":
        limit = torch.finfo(dtype).max / 16
        spread, low, high = spread * _LARGE_RATIO, -limit, limit
    # Keep the example's range: probabilities and pixels stay within 0 to 1, logarithms keep their domain.
    return (mean + spread * normal).clamp(low, high)


def is_additive_mask(old: torch.Tensor) -> bool:
    """Whether it holds only 0 and one very negative number, finite or not."""
    low = old.min()
    return bool(low <= _MASKED_BELOW) and bool(((old == 0) | (old == low)).all())


def _integers(old: torch.Tensor, generator: torch.Generator, like: Like) -> torch.Tensor:
    low, high = int(old.min()), int(old.max())
    # Ascending rows are positions or offsets. Random ones would repeat, and writes to a cache would collide.
    # Zeros and ones are a mask, like booleans.
    if low == high or is_ascending(old) or (low, high) == (0, 1):
        return old
    if like == "zeros":
        return torch.full_like(old, low)
    if like == "permuted":
        return _permuted(old, generator)
    above = min(high + 1, torch.iinfo(torch.int64).max)
    return torch.randint(low, above, old.shape, generator=generator, dtype=torch.int64, device="cpu")


def is_ascending(old: torch.Tensor) -> bool:
    """Whether every row has several numbers and ascends: positions, offsets."""
    return old.ndim > 0 and old.shape[-1] > 1 and bool((old[..., 1:] >= old[..., :-1]).all())


RowDims = Sequence["int | None"]
"""For each leaf of ``(args, kwargs)`` the dimension of its rows. None if it has no rows."""


def row_dims(example: Example, size: int, other: Example | None = None) -> tuple[int | None, ...]:
    """The dimension in which each leaf has ``size`` rows: where it differs from ``other``, of another batch size.

    Without ``other`` it is the first dimension, if that has the length of the batch.
    """
    values, structure = pytree.flatten((example.args, example.kwargs))
    if other is not None:
        others, its_structure = pytree.flatten((other.args, other.kwargs))
        if structure == its_structure:
            return tuple(_differing(one, two, size) for one, two in zip(values, others, strict=True))
    return tuple(_first_dim(value, size) for value in values)


def adversaries(example: Example, dims: RowDims, seed: int) -> Iterator[tuple[str, Example]]:
    """Four kinds of inputs: ``zeros``, ``large values``, ``rows in another order`` and ``a row of NaN``.

    Integers stay within the example's range. Booleans and masks move with their rows, but do not change. If a kind
    cannot change anything in an example, its values are those of :func:`fresh`.
    """
    plain = fresh(example, seed)
    yield "zeros", fresh(example, seed, like="zeros")
    yield "large values", fresh(example, seed, like="large")
    yield "rows in another order", _map_rows(plain, dims, _shifted)
    yield "a row of NaN", _map_rows(plain, dims, _with_nan_row)


def lowered(example: Example) -> Example:
    """The example with constant positive integers lowered by one, such as a single token id or a position."""

    def lower(tensor: torch.Tensor) -> torch.Tensor:
        is_whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized)
        if not is_whole or tensor.dtype == torch.bool or not tensor.numel():
            return filled_like(tensor, tensor)
        low, high = int(tensor.min()), int(tensor.max())
        return filled_like(tensor, tensor - 1 if low == high > 0 else tensor)

    return map_example(example, lower)


def beside(example: Example, wider: Example, dims: RowDims) -> Example:
    """``wider`` with its first rows, and its leaves without rows, from ``example``. ``dims`` holds for both."""
    values, _ = pytree.flatten((example.args, example.kwargs))
    wide, structure = pytree.flatten((wider.args, wider.kwargs))
    mixed = [_over(value, other, dim) for value, other, dim in zip(values, wide, dims, strict=True)]
    args, kwargs = pytree.unflatten(structure, mixed)
    return Example(args=args, kwargs=kwargs)


def _over(value: Any, wider: Any, dim: int | None) -> Any:
    if dim is None:
        return value
    rows = value.shape[dim]
    return filled_like(wider, torch.cat([value, wider.narrow(dim, rows, wider.shape[dim] - rows)], dim))


def _map_rows(example: Example, dims: RowDims, function: Callable[[torch.Tensor, int], torch.Tensor | None]) -> Example:
    """``example`` with ``function(tensor, dimension of its rows)``, or a copy if this is None."""
    values, _ = pytree.flatten((example.args, example.kwargs))
    pairs = zip(values, dims, strict=True)
    dim_of = {id(value): dim for value, dim in pairs if isinstance(value, torch.Tensor) and dim is not None}

    def mapped(tensor: torch.Tensor) -> torch.Tensor:
        dim = dim_of.get(id(tensor))
        made = None if dim is None or tensor.is_quantized else function(tensor, dim)
        return filled_like(tensor, tensor if made is None else made)

    return map_example(example, mapped)


def _shifted(tensor: torch.Tensor, dim: int) -> torch.Tensor | None:
    # Offsets and positions along the batch must stay ascending.
    is_whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    return None if is_whole and tensor.ndim == 1 and is_ascending(tensor) else tensor.roll(1, dim)


def _with_nan_row(tensor: torch.Tensor, dim: int) -> torch.Tensor | None:
    # Eight-bit floats lack arithmetic, and some have no NaN.
    if not tensor.is_floating_point() or tensor.itemsize == 1 or not tensor.numel():
        return None
    if is_additive_mask(tensor.detach().cpu().double()):
        return None
    made = tensor.clone()
    made.narrow(dim, tensor.shape[dim] - 1, 1).fill_(torch.nan)
    return made


def _differing(one: object, two: object, size: int) -> int | None:
    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor) or one.ndim != two.ndim:
        return None
    pairs = enumerate(zip(one.shape, two.shape, strict=True))
    return next((dim for dim, (length, other) in pairs if length == size != other), None)


def _first_dim(value: object, size: int) -> int | None:
    return 0 if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == size else None
