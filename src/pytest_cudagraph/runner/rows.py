"""Rows: padding inputs to a captured batch size, and cutting the outputs back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pytest_cudagraph import leaves
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.runner.statistics import EagerReason


def padded(tensor: torch.Tensor, dim: int, rows: int) -> torch.Tensor:
    """``tensor`` with its last row repeated up to ``rows``: values the model knows how to handle."""
    given = tensor.shape[dim]
    last = tensor.narrow(dim, given - 1, 1)
    missing = rows - given
    if missing > 1:
        last = last.expand(*tensor.shape[:dim], missing, *tensor.shape[dim + 1 :])
    return torch.cat((tensor, last), dim)


@dataclass(frozen=True, slots=True)
class Cut:
    """Where each leaf of an output has its rows; None for a leaf that is the same whatever the number of rows."""

    dims: tuple[int | None, ...]

    def __call__(self, output: Any, rows: int) -> Any:
        """The first ``rows`` rows of the output, as views."""
        if type(output) is torch.Tensor:
            return _first_rows(output, self.dims[0], rows)
        values, structure = leaves.flatten(output)
        pairs = zip(values, self.dims, strict=True)
        return leaves.unflatten(structure, [_first_rows(value, dim, rows) for value, dim in pairs])


@dataclass(frozen=True, slots=True)
class NoCut:
    """That outputs cannot be served from padded inputs, and why."""

    why: str
    reason: EagerReason = EagerReason.NOT_PADDED
    """As which calls that would need padding are counted."""


def find_cut(call: Callable[[Example], Any], whole: Example, shorter: Example, rows: int) -> Cut | NoCut:
    """Learn from two eager calls, with ``rows`` rows and with one less, which dimension of each output has the rows.

    A size that merely happens to be the batch size is thus never taken for it.
    """
    output = call(whole)
    try:
        less = call(shorter)
    # Whatever it raises: a model that takes no fewer rows is never padded, and a caller sees the error in his own call.
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        return NoCut(f"with {rows - 1} rows the model raises {type(error).__name__}: {first_line}")
    full, structure = leaves.flatten(output)
    fewer, other = leaves.flatten(less)
    if structure != other:
        return NoCut(f"the output is nested differently with {rows} and with {rows - 1} rows")
    dims: list[int | None] = []
    for path, one, two in zip(leaves.paths(structure), full, fewer, strict=True):
        found = _row_dim(one, two, rows)
        if isinstance(found, str):
            return NoCut(f"output{path} {found}")
        dims.append(found)
    return Cut(tuple(dims))


def _row_dim(one: Any, two: Any, rows: int) -> int | str | None:
    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor):
        return (
            None if type(one) is type(two) and one == two else f"is {one!r} with {rows} rows, {two!r} with {rows - 1}"
        )
    differing = [dim for dim, sizes in enumerate(zip(one.shape, two.shape, strict=False)) if sizes[0] != sizes[1]]
    if one.shape == two.shape:
        return None
    if one.ndim == two.ndim and len(differing) == 1:
        dim = differing[0]
        if (one.shape[dim], two.shape[dim]) == (rows, rows - 1):
            return dim
    return f"has shape {tuple(one.shape)} with {rows} rows, {tuple(two.shape)} with {rows - 1}"


def _first_rows(value: Any, dim: int | None, rows: int) -> Any:
    return value if dim is None else value.narrow(dim, 0, rows)
