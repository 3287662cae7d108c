"""The rows of a call: their number, their padding, and the rows of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from pytest_cudagraph import pytree
from pytest_cudagraph.errors import first_line
from pytest_cudagraph.foreign import value_text
from pytest_cudagraph.inputs import Example, batched_dims
from pytest_cudagraph.inputs.example import argument_name, is_opaque
from pytest_cudagraph.pytree import LEAF, flatten
from pytest_cudagraph.serving.statistics import NoGraphReason
from pytest_cudagraph.state.storages import is_addressable


def padded(tensor: torch.Tensor, dim: int, rows: int) -> torch.Tensor:
    """``tensor`` with its last row repeated up to ``rows``, because the model accepts those values."""
    row_count = tensor.shape[dim]
    last = tensor.narrow(dim, row_count - 1, 1)
    missing = rows - row_count
    if missing > 1:
        last = last.expand(*tensor.shape[:dim], missing, *tensor.shape[dim + 1 :])
    return torch.cat((tensor, last), dim)


@dataclass(frozen=True, slots=True)
class Cut:
    """The dimension of the rows of each output leaf; None for a leaf without rows."""

    dims: tuple[int | None, ...]

    def __call__(self, output: Any, rows: int) -> Any:
        """The first ``rows`` rows of the output, as views."""
        if type(output) is torch.Tensor:
            return _first_rows(output, self.dims[0], rows)
        values, structure = pytree.flatten(output)
        pairs = zip(values, self.dims, strict=True)
        return pytree.unflatten(structure, [_first_rows(value, dim, rows) for value, dim in pairs])


@dataclass(frozen=True, slots=True)
class NoCut:
    """Why a call cannot be padded."""

    why: str
    reason: NoGraphReason = NoGraphReason.NOT_PADDED
    """The counter for calls that need padding."""


def find_cut(call: Callable[[Example], Any], whole: Example, shorter: Example, rows: int) -> Cut | NoCut:
    """Find the dimension of the rows in each output, from a call with ``rows`` rows and a call with one less.

    A dimension that only happens to be as long as the batch is not taken for it.
    """
    output = call(whole)
    try:
        less = call(shorter)
    # A model may raise anything for fewer rows. Then it is never padded, and such a call raises the same.
    except Exception as error:
        return NoCut(f"with {rows - 1} rows the model raises {first_line(error)}")
    full, structure = pytree.flatten(output)
    fewer, other = pytree.flatten(less)
    if structure != other:
        return NoCut(f"the output is nested differently with {rows} and with {rows - 1} rows")
    dims: list[int | None] = []
    for path, one, two in zip(pytree.paths(structure), full, fewer, strict=True):
        dim = _row_dim(one, two, rows)
        if isinstance(dim, str):
            return NoCut(f"output{path} {dim}")
        dims.append(dim)
    return Cut(tuple(dims))


def _row_dim(one: Any, two: Any, rows: int) -> int | str | None:
    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor):
        return (
            None if type(one) is type(two) and one == two else f"is {one!r} with {rows} rows, {two!r} with {rows - 1}"
        )
    if not (is_addressable(one) and is_addressable(two)):
        return "is a sparse or nested tensor"
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


class _Slot(NamedTuple):
    """One tensor of the example; ``dim`` is the dimension of its rows, None if it has no rows."""

    at: int
    dim: int | None
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def at_rows(self, rows: int) -> tuple[int, ...]:
        """The shape with this number of rows."""
        if self.dim is None:
            return tuple(self.shape)
        return (*self.shape[: self.dim], rows, *self.shape[self.dim + 1 :])

    @property
    def text(self) -> str:
        """``int64 (rows, 5)``."""
        sizes = ["rows" if dim == self.dim else str(size) for dim, size in enumerate(self.shape)]
        return f"{str(self.dtype).removeprefix('torch.')} ({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


_Fit = tuple[int, tuple[int, ...], torch.dtype, torch.device]
"""Position, shape, dtype and device of one tensor of a call with a known number of rows."""


class CallForm:
    """The form of the example's arguments. A graph serves only calls of this form."""

    def __init__(self, example: Example, batch_dim: Any) -> None:
        values, self._structure = flatten((example.args, example.kwargs))
        dims = batched_dims(example, batch_dim)
        self._slots = [
            _Slot(at, None if dim is None else dim % value.ndim, value.shape, value.dtype, value.device)
            for at, (value, dim) in enumerate(zip(values, dims, strict=True))
            if isinstance(value, torch.Tensor)
        ]
        self._plain = [(at, value) for at, value in enumerate(values) if not isinstance(value, torch.Tensor)]
        first = next((slot for slot in self._slots if slot.dim is not None), None)
        self.has_rows = first is not None
        """Whether calls have a number of rows. A call without one has the form of the example, or another."""
        self._first_at, self._first_dim = (first.at, first.dim or 0) if first else (0, 0)
        self._known: dict[int, list[_Fit]] = {}
        positional, named = self._structure.children
        self._count, self._names = len(example.args), tuple(named.context[0]) if example.kwargs else ()
        self._is_flat = all(child is LEAF for child in (*positional.children, *named.children))
        self._is_positional = self._is_flat and not self._names

    def read(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], largest: int
    ) -> tuple[list[Any], int | NoGraphReason]:
        """The leaves of a call with its number of rows, at most ``largest``, or with the reason why no graph fits.

        A call without rows counts as ``largest``.
        """
        if self._is_positional and not kwargs and len(args) == self._count:
            values: list[Any] | None = list(args)
        else:
            values = self._values(args, kwargs)
        if values is None or (self._plain and not self._has_baked(values)):
            return [], NoGraphReason.OTHER_ARGUMENT
        if not self.has_rows:
            return values, largest if _fit(values, self._at_rows(largest)) else NoGraphReason.OTHER_SHAPE
        try:
            rows = values[self._first_at].shape[self._first_dim]
        except (AttributeError, IndexError, RuntimeError):  # no tensor, too few dimensions, or nested
            return values, NoGraphReason.OTHER_SHAPE
        if not 0 < rows <= largest:
            outside = NoGraphReason.TOO_LARGE if rows else NoGraphReason.NO_ROWS
            return values, outside if _fit(values, self._at_rows(rows)) else NoGraphReason.OTHER_SHAPE
        fits = self._known.get(rows)
        if fits is None:
            fits = self._known[rows] = self._at_rows(rows)
        return values, rows if _fit(values, fits) else NoGraphReason.OTHER_SHAPE

    @property
    def text(self) -> str:
        """The arguments in words: ``args[0] int64 (rows, 5), args[1]=2``."""
        tensors = {slot.at: slot for slot in self._slots}
        plain = dict(self._plain)
        names = [argument_name(path) for path in pytree.paths(self._structure)]
        words = (
            f"{name} {tensors[at].text}" if at in tensors else f"{name}={_plain_text(plain[at])}"
            for at, name in enumerate(names)
        )
        return ", ".join(words) or "no arguments"

    def shared_shapes(self, largest: int, other: CallForm, others_largest: int) -> tuple[tuple[int, ...], ...] | None:
        """The shapes of the tensors of a call that fits both forms; None if there is no such call."""
        plain = dict(other._plain)
        if self._structure != other._structure or plain.keys() != dict(self._plain).keys():
            return None
        kinds = [[(slot.dtype, slot.device) for slot in form._slots] for form in (self, other)]
        if kinds[0] != kinds[1] or not self._has_baked(plain):
            return None
        shapes = {tuple(slot.at_rows(rows) for slot in other._slots) for rows in range(1, others_largest + 1)}
        shapes_here = (tuple(slot.at_rows(rows) for slot in self._slots) for rows in range(largest, 0, -1))
        return next((each for each in shapes_here if each in shapes), None)

    def padded(self, values: Sequence[Any], rows: int) -> list[Any]:
        """The leaves of a call, each batched tensor padded to ``rows``."""
        filled = list(values)
        for slot in self._slots:
            if slot.dim is not None:
                filled[slot.at] = padded(filled[slot.at], slot.dim, rows)
        return filled

    def _values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """The leaves of a call in the example's order; None if nesting or names differ."""
        if not self._is_flat:
            values, structure = flatten((args, kwargs))
            return values if structure == self._structure else None
        # Fast path for a few tensors: to flatten them would double the time of this method.
        if len(args) != self._count or len(kwargs) != len(self._names):
            return None
        if not all(name in kwargs for name in self._names):
            return None
        return [*args, *[kwargs[name] for name in self._names]]

    def _has_baked(self, values: list[Any] | dict[int, Any]) -> bool:
        for at, baked in self._plain:
            leaf = values[at]
            # 1, 1.0 and True are equal but compute differently. A comparison may return an array.
            if leaf is not baked and not (type(leaf) is type(baked) and (leaf == baked) is True):
                return False
        return True

    def _at_rows(self, rows: int) -> list[_Fit]:
        return [(slot.at, slot.at_rows(rows), slot.dtype, slot.device) for slot in self._slots]


def _fit(values: list[Any], fits: list[_Fit]) -> bool:
    for at, shape, dtype, device in fits:
        leaf = values[at]
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.is_nested:
            return False
        if leaf.shape != shape or leaf.dtype is not dtype or leaf.device != device:
            return False
    return True


def _plain_text(value: Any) -> str:
    return type(value).__name__ if is_opaque(value) else value_text(value)
