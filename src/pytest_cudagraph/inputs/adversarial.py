"""Inputs that an example seldom holds and a graph must take as eager does: zeros, large values, other rows, NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from pytest_cudagraph import leaves
from pytest_cudagraph.inputs.example import Example, filled_like, map_example
from pytest_cudagraph.inputs.fresh import fresh, is_additive_mask, is_ascending

RowDims = Sequence["int | None"]
"""For each leaf of ``(args, kwargs)`` the dimension of its rows; None for a leaf without rows."""


def row_dims(example: Example, size: int, other: Example | None = None) -> tuple[int | None, ...]:
    """Where the leaves have ``size`` rows: the dimension in which ``other``, of another batch size, differs.

    Without ``other`` the first dimension, where it is as long as the batch.
    """
    values, structure = leaves.flatten((example.args, example.kwargs))
    if other is not None:
        others, its_structure = leaves.flatten((other.args, other.kwargs))
        if structure == its_structure:
            return tuple(_differing(one, two, size) for one, two in zip(values, others, strict=True))
    return tuple(_first_dim(value, size) for value in values)


def adversaries(example: Example, dims: RowDims, seed: int) -> Iterator[tuple[str, Example]]:
    """``zeros``, ``large values``, ``rows in another order`` and ``a row of NaN``, beside the fresh values of ``seed``.

    Whole numbers stay within the example's range; booleans and masks move with their rows, and hold what they held.
    Where an example has nothing that a kind of input could change, the values are the fresh ones.
    """
    plain = fresh(example, seed)
    yield "zeros", fresh(example, seed, like="zeros")
    yield "large values", fresh(example, seed, like="large")
    yield "rows in another order", _map_rows(plain, dims, _shifted)
    yield "a row of NaN", _map_rows(plain, dims, _with_nan_row)


def lowered(example: Example) -> Example:
    """Positive whole numbers that are all one value, less one: a token id, a position that no range is known of."""

    def lower(tensor: torch.Tensor) -> torch.Tensor:
        is_whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized)
        if not is_whole or tensor.dtype == torch.bool or not tensor.numel():
            return filled_like(tensor, tensor)
        low, high = int(tensor.min()), int(tensor.max())
        return filled_like(tensor, tensor - 1 if low == high > 0 else tensor)

    return map_example(example, lower)


def beside(example: Example, wider: Example, dims: RowDims) -> Example:
    """``wider`` with its first rows taken from ``example``, and what has no rows as well; dims are those of both."""
    values, _ = leaves.flatten((example.args, example.kwargs))
    wide, structure = leaves.flatten((wider.args, wider.kwargs))
    mixed = [_over(value, other, dim) for value, other, dim in zip(values, wide, dims, strict=True)]
    args, kwargs = leaves.unflatten(structure, mixed)
    return Example(args=args, kwargs=kwargs)


def _over(value: Any, wider: Any, dim: int | None) -> Any:
    if dim is None:
        return value
    rows = value.shape[dim]
    return filled_like(wider, torch.cat([value, wider.narrow(dim, rows, wider.shape[dim] - rows)], dim))


def _map_rows(example: Example, dims: RowDims, function: Callable[[torch.Tensor, int], torch.Tensor | None]) -> Example:
    """``example`` with ``function(tensor, dimension of its rows)``; where that gives None, the tensor as it is."""
    values, _ = leaves.flatten((example.args, example.kwargs))
    pairs = zip(values, dims, strict=True)
    dim_of = {id(value): dim for value, dim in pairs if isinstance(value, torch.Tensor) and dim is not None}

    def mapped(tensor: torch.Tensor) -> torch.Tensor:
        dim = dim_of.get(id(tensor))
        made = None if dim is None or tensor.is_quantized else function(tensor, dim)
        return filled_like(tensor, tensor if made is None else made)

    return map_example(example, mapped)


def _shifted(tensor: torch.Tensor, dim: int) -> torch.Tensor | None:
    # Offsets and positions along the batch must go on ascending.
    is_whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    return None if is_whole and tensor.ndim == 1 and is_ascending(tensor) else tensor.roll(1, dim)


def _with_nan_row(tensor: torch.Tensor, dim: int) -> torch.Tensor | None:
    # The eight-bit floats know little arithmetic, and one of them no NaN.
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
