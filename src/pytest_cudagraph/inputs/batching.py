"""Make one example for each batch size from the user's example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from pytest_cudagraph import pytree
from pytest_cudagraph.errors import InputError
from pytest_cudagraph.foreign import value_text
from pytest_cudagraph.inputs.example import Example, argument_name, check_leaves, check_one_device, named_tensors

DEFAULT_DIM = 0
"""For arguments that the tree does not name."""

_TAKES = (
    "allowed are an int, None for tensors without a batch dimension, a tuple with one entry for each positional "
    "argument, a dict of keyword arguments, or (positional, keywords)"
)


def batch_dims(example: Example, batch_dim: Any) -> list[int | None]:
    """The batch dimension of each leaf of ``(args, kwargs)``, in the order of :func:`pytree.flatten`.

    Raises :class:`InputError` for a tree that does not match the arguments.
    """
    _, structure = pytree.flatten((example.args, example.kwargs))
    of_args, of_kwargs = structure.children
    if batch_dim is None or _is_int(batch_dim):
        return _matched(batch_dim, structure, "batch_dim")
    if isinstance(batch_dim, dict):
        return _matched(DEFAULT_DIM, of_args, "batch_dim") + _matched(batch_dim, of_kwargs, "batch_dim")
    if not isinstance(batch_dim, tuple | list):
        raise InputError(f"batch_dim={value_text(batch_dim)} is a {type(batch_dim).__name__}: {_TAKES}")
    return _from_sequence(batch_dim, of_args, of_kwargs)


def _from_sequence(batch_dim: Any, of_args: pytree.Structure, of_kwargs: pytree.Structure) -> list[int | None]:
    """One entry for each positional argument. If that does not fit, a pair for both kinds of arguments."""
    try:
        return _matched(batch_dim, of_args, "batch_dim") + _matched(DEFAULT_DIM, of_kwargs, "batch_dim")
    except InputError:
        if len(batch_dim) != 2 or not (isinstance(batch_dim[1], dict) or of_kwargs.children):
            raise
    return _matched(batch_dim[0], of_args, "batch_dim[0]") + _matched(batch_dim[1], of_kwargs, "batch_dim[1]")


def _matched(entry: Any, structure: pytree.Structure, where: str) -> list[int | None]:
    if entry is None or _is_int(entry):
        return [entry] * len(pytree.paths(structure))
    children = structure.children
    if not isinstance(entry, dict | tuple | list):
        raise InputError(f"{where}={value_text(entry)} is a {type(entry).__name__}: {_TAKES}")
    needs = object if isinstance(entry, dict) else tuple | list
    if structure.node is None or not issubclass(structure.node, needs):
        raise InputError(
            f"{where}={value_text(entry)} does not match the example, which has {_kind(structure)} there: {_TAKES}"
        )
    if isinstance(entry, dict):
        return _matched_names(entry, structure, where)
    if len(entry) != len(children):
        raise InputError(
            f"{where}={value_text(entry)} has {len(entry)} entries, but the example has {len(children)}: {_TAKES}"
        )
    pairs = zip(entry, children, strict=True)
    return [dim for position, (e, c) in enumerate(pairs) for dim in _matched(e, c, f"{where}[{position}]")]


def _matched_names(entry: dict[Any, Any], structure: pytree.Structure, where: str) -> list[int | None]:
    """Match names with dict keys and with fields of dataclasses and named tuples. Others get the default."""
    steps = pytree.steps(structure)
    unknown = [key for key in entry if f"[{key!r}]" not in steps and f".{key}" not in steps]
    if unknown:
        there = ", ".join(step.strip("[].'") for step in steps) or "none"
        raise InputError(f"{where} names {value_text(unknown[0])}, but the example has only {there} there: {_TAKES}")
    by_step = {f"[{key!r}]": (key, sub) for key, sub in entry.items()}
    by_step |= {f".{key}": (key, sub) for key, sub in entry.items()}
    found: list[int | None] = []
    for step, child in zip(steps, structure.children, strict=True):
        key, sub = by_step.get(step, (step, DEFAULT_DIM))
        found += _matched(sub, child, f"{where}[{key!r}]")
    return found


def _kind(structure: pytree.Structure) -> str:
    return "a single value" if structure.node is None else f"a {structure.node.__name__}"


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class Resizing(NamedTuple):
    """How examples of other batch sizes are made: the example's own batch size, and the names of resized tensors.

    ``size`` is None for an example without a batch dimension, which runs as it is.
    """

    size: int | None
    names: tuple[str, ...]


class _Batched(NamedTuple):
    """The flat example: its leaves, the batch dimension of each (None: not resized), and its batch size, if any."""

    values: list[Any]
    structure: pytree.Structure
    dims: list[int | None]
    size: int | None


def example_batch_size(example: Example, batch_dim: Any = 0) -> int | None:
    """The batch size of the first tensor that has a batch dimension. None if none has one."""
    return _batched(example, batch_dim).size


def batch_examples(example: Example, batch_sizes: Sequence[int], batch_dim: Any = 0) -> dict[int, Example]:
    """One example for each batch size. Tensors with the example's batch size are repeated or cut, others are shared.

    ``batch_dim`` is an int for all tensors, or a tree of ints and None for ``args``, for ``kwargs`` (a dict), or
    for both (a pair). Resized tensors are copies with the same dtype, device and memory format, without gradient.
    An example without a batch dimension stays as it is, and takes one batch size.
    Raises :class:`InputError` for inputs, sizes and trees that cannot be used.
    """
    check_sizes(batch_sizes)
    batched = _batched(example, batch_dim)
    check_one_device(example)
    if batched.size is None and len(batch_sizes) > 1:
        found = "batch_dim is None for every tensor" if named_tensors(example) else "they hold no tensor"
        raise InputError(
            f"example inputs without a batch dimension run as they are, at one batch size; here {found}, found batch "
            f"sizes {list(batch_sizes)}: give one, as in batch_sizes=[1], or the dimension of the rows in batch_dim"
        )
    return {size: _at_size(batched, size) for size in batch_sizes}


def batched_dims(example: Example, batch_dim: Any = 0) -> list[int | None]:
    """The dimension in which each leaf of ``(args, kwargs)`` is resized. None for leaves that are not resized."""
    return _batched(example, batch_dim).dims


def resizing(example: Example, batch_dim: Any = 0) -> Resizing:
    """The tensors that :func:`batch_examples` resizes, by name: ``args[0]``, ``kwargs['mask']``."""
    batched = _batched(example, batch_dim)
    named = zip(pytree.paths(batched.structure), batched.dims, strict=True)
    return Resizing(size=batched.size, names=tuple(argument_name(path) for path, dim in named if dim is not None))


def check_sizes(batch_sizes: Any) -> None:
    """Raise :class:`InputError` unless these are one or more distinct positive ints."""
    takes = "batch sizes must be distinct positive ints, such as [1, 8]"
    if isinstance(batch_sizes, str) or not isinstance(batch_sizes, Sequence):
        raise InputError(f"{takes}, found {value_text(batch_sizes)}")
    if not batch_sizes:
        raise InputError(f"{takes}, found none")
    for size in batch_sizes:
        if not isinstance(size, int) or isinstance(size, bool):
            raise InputError(f"{takes}, found {value_text(size)}, a {type(size).__name__}")
        if size < 1:
            raise InputError(f"{takes}, found {size}")
        if list(batch_sizes).count(size) > 1:
            raise InputError(f"{takes}, found {size} more than once in {list(batch_sizes)}")


def _batched(example: Example, batch_dim: Any) -> _Batched:
    check_leaves(example)
    values, structure = pytree.flatten((example.args, example.kwargs))
    dims = batch_dims(example, batch_dim)
    size = _first_size(values, structure, dims)
    kept = [dim if _has_size(value, dim, size) else None for value, dim in zip(values, dims, strict=True)]
    return _Batched(values=values, structure=structure, dims=kept, size=size)


def _first_size(values: list[Any], structure: pytree.Structure, dims: list[int | None]) -> int | None:
    """The batch size of the first tensor with a batch dimension, in the order of the user's call. None without one."""
    tensors = [at for at in pytree.written_order(structure) if isinstance(values[at], torch.Tensor)]
    first = next((at for at in tensors if dims[at] is not None), None)
    return None if first is None else _size_at(values[first], dims[first], pytree.paths(structure)[first])


def _size_at(tensor: torch.Tensor, dim: int | None, path: str) -> int:
    name = argument_name(path)
    remedy = ": give another batch_dim, or a tree with None for tensors without a batch dimension"
    if tensor.ndim == 0:
        raise InputError(f"{name} has no dimensions, so it has no batch dimension {dim}{remedy}")
    if dim is None or not -tensor.ndim <= dim < tensor.ndim:
        shape, last = tuple(tensor.shape), tensor.ndim - 1
        raise InputError(
            f"batch_dim={dim} is out of range for {name} of shape {shape}, whose dimensions are 0 to {last}{remedy}"
        )
    if tensor.shape[dim] == 0:
        raise InputError(
            f"{name} of shape {tuple(tensor.shape)} has batch size 0, which cannot be repeated: "
            "give an example with at least one row"
        )
    return tensor.shape[dim]


def _has_size(value: Any, dim: int | None, size: int | None) -> bool:
    if dim is None or not isinstance(value, torch.Tensor):
        return False
    return -value.ndim <= dim < value.ndim and value.shape[dim] == size


def _at_size(batched: _Batched, size: int) -> Example:
    made: dict[tuple[int, int], torch.Tensor] = {}  # keep a tensor that is passed twice one tensor

    def resized(value: Any, dim: int | None) -> Any:
        if dim is None:
            return value
        if (id(value), dim) not in made:
            made[id(value), dim] = _allocated(value, dim, size)
        return made[id(value), dim]

    pairs = zip(batched.values, batched.dims, strict=True)
    args, kwargs = pytree.unflatten(batched.structure, [resized(value, dim) for value, dim in pairs])
    return Example(args=args, kwargs=kwargs)


def _allocated(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    try:
        return _resized(tensor, dim, size)
    # Not enough memory, or more elements than torch or a C integer can count.
    except (RuntimeError, OverflowError, MemoryError) as error:
        shape = [*tensor.shape[: dim % tensor.ndim], size, *tensor.shape[dim % tensor.ndim + 1 :]]
        raise InputError(
            f"batch size {size}: an input of shape {tuple(shape)} cannot be made ({str(error).splitlines()[0]}): "
            "give smaller batch sizes"
        ) from None


@torch.no_grad()
def _resized(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Repeat or cut rows into a new dense tensor with the same order of dimensions in memory (channels last)."""
    strides = tensor.stride()
    # An expanded dimension (stride 0) has no order in memory.
    order = sorted(range(tensor.ndim), key=lambda axis: 0 if 0 in strides else -strides[axis])
    rows = torch.arange(size, device=tensor.device) % tensor.shape[dim]
    taken = tensor.detach().permute(order).index_select(order.index(dim % tensor.ndim), rows)
    return taken.permute([order.index(axis) for axis in range(tensor.ndim)])
