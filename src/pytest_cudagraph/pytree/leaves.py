"""Flatten nested inputs and outputs to lists of leaves, and rebuild them.

Nodes are dict, list, tuple, named tuples, dataclass instances, dict and list subclasses (such as a ``ModelOutput`` of
transformers), ``UserDict``, ``SimpleNamespace`` and classes registered with torch's pytree. Everything else is one
leaf: tensors, numbers, None, and opaque objects such as a key-value cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from pytest_cudagraph.errors import InputError
from pytest_cudagraph.pytree.containers import KeyOrder, known_node, node_of


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array or a scalar of NumPy, which need not be installed."""
    return hasattr(type(leaf), "__array_interface__")


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits, including NaN payloads and the sign of zero."""
    if kind_of(first) != kind_of(second) or first.shape != second.shape:
        return False
    return torch.equal(_bits(first), _bits(second))


def kind_of(tensor: torch.Tensor) -> tuple[torch.dtype, torch.device, torch.layout]:
    """What two tensors must share so that their values can be compared."""
    return tensor.dtype, tensor.device, tensor.layout


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    # Viewing a quantized tensor as bytes crashes the process.
    tensor = tensor.int_repr() if tensor.is_quantized else tensor
    tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


class Structure(NamedTuple):
    """A nested value without its leaves. Equal structures hold leaves in the same order and meaning."""

    node: type | None
    context: Any
    children: tuple[Structure, ...]


LEAF = Structure(None, None, ())
ONE_LEAF = Structure(tuple, None, (LEAF,))
EMPTY_DICT = Structure(dict, ((), KeyOrder()), ())
_structure = tuple.__new__  # twice as fast as the constructor of a named tuple


_TOO_DEEP = (
    "containers of arguments and outputs may be nested some hundred levels deep; found one that holds itself, or is "
    "nested deeper: pass flat lists or dicts of tensors"
)


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """The leaves of ``value``, and the structure that rebuilds it.

    Raises :class:`~pytest_cudagraph.errors.InputError` for containers that are nested without end.
    """
    leaves: list[Any] = []
    try:
        return leaves, _collect(value, leaves)
    except RecursionError:
        raise InputError(_TOO_DEEP) from None


def unflatten(structure: Structure, leaves: Iterable[Any]) -> Any:
    """The value of ``structure`` with these leaves. Raises :class:`ValueError` if there are too many or too few."""
    remaining = iter(leaves)
    try:
        value = _build(structure, remaining)
    except StopIteration:
        raise ValueError("too few leaves for this structure") from None
    if next(remaining, LEAF) is not LEAF:
        raise ValueError("too many leaves for this structure")
    return value


def paths(structure: Structure) -> list[str]:
    """The path of each leaf, in the order of :func:`flatten`: ``['logits']``, ``[0].hidden``. '' for a single leaf."""
    if structure.node is None:
        return [""]
    pairs = zip(steps(structure), structure.children, strict=True)
    return [step + path for step, child in pairs for path in paths(child)]


def steps(structure: Structure) -> list[str]:
    """The step of a path from this node to each child: ``['logits']``, ``[0]``, ``.hidden``."""
    if structure.node is None:
        return []
    return known_node(structure.node).steps(structure.context, len(structure.children))


def written_order(structure: Structure) -> list[int]:
    """Positions in the list of leaves, in the order of the value as written: dict keys as given, not sorted."""
    return _written(structure, 0)[0]


def named_leaves(value: Any) -> list[tuple[str, Any]]:
    """Every leaf with its path, in the order of :func:`flatten`."""
    leaves, structure = flatten(value)
    return list(zip(paths(structure), leaves, strict=True))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor leaf, in the order of :func:`flatten`. One that occurs twice is listed twice."""
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def has_same_tensors(first: Any, second: Any) -> bool:
    """Whether two values hold equal tensors. Both must hold the same number of tensors."""
    return all(torch.equal(one, other) for one, other in zip(tensors_in(first), tensors_in(second), strict=True))


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """``value`` with ``function(tensor)`` for every tensor. Other leaves are shared."""
    leaves, structure = flatten(value)
    return unflatten(structure, [function(x) if isinstance(x, torch.Tensor) else x for x in leaves])


def is_exhaustible(value: Any) -> bool:
    """Whether reading ``value`` uses it up: generators, ``map``, files."""
    return isinstance(value, Iterator)


def _collect(value: Any, leaves: list[Any]) -> Structure:
    # This runs at every replay. Most calls hold only tuples, empty dicts and tensors, so these come first.
    cls: Any = type(value)
    if cls is tuple:
        shapes = tuple([_collect(child, leaves) for child in value])
        return ONE_LEAF if len(shapes) == 1 and shapes[0] is LEAF else _structure(Structure, (tuple, None, shapes))
    if cls is torch.Tensor:
        leaves.append(value)
        return LEAF
    if cls is dict and not value:
        return EMPTY_DICT
    node = node_of(cls)
    if node is None:
        leaves.append(value)
        return LEAF
    children, context = node.split(value)
    return _structure(Structure, (cls, context, tuple([_collect(child, leaves) for child in children])))


def _build(structure: Structure, leaves: Iterator[Any]) -> Any:
    if structure.node is None:
        return next(leaves)
    # A generator would turn the StopIteration for too few leaves into a RuntimeError.
    children = [_build(child, leaves) for child in structure.children]
    if structure.node is tuple:
        return tuple(children)
    return known_node(structure.node).join(structure.node, structure.context, children)


def _written(structure: Structure, start: int) -> tuple[list[int], int]:
    if structure.node is None:
        return [start], start + 1
    blocks: list[list[int]] = []
    for child in structure.children:
        block, start = _written(child, start)
        blocks.append(block)
    if structure.node is dict:
        keys, order = structure.context
        by_key = dict(zip(keys, blocks, strict=True))
        blocks = [by_key[key] for key in order]
    return [position for block in blocks for position in block], start


class LeafReader:
    """The leaves of calls with the containers of one call, in a fraction of the time of ``flatten``.

    ``structure`` is that of ``(args, kwargs)``. Containers other than dict, list and tuple are not read.
    """

    def __init__(self, structure: Structure) -> None:
        positional, named = structure.children
        self._count, self._names = len(positional.children), named.context[0]
        # All containers of the arguments are opened into one list, the outer ones first. ``order`` finds the leaves.
        parts = [*positional.children, *named.children]
        self._containers: list[tuple[int, Any, int, Any]] = []
        self._is_readable = True
        opened: dict[int, range] = {}
        for at, part in enumerate(parts):  # which grows
            if part.node is None:
                continue
            self._is_readable &= part.node in (dict, list, tuple)
            keys = part.context[0] if part.node is dict else None
            self._containers.append((at, part.node, len(part.children), keys))
            opened[at] = range(len(parts), len(parts) + len(part.children))
            parts += part.children
        self._order = [at for first in range(self._count + len(self._names)) for at in _positions(first, opened)]

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Any] | None:
        """The leaves in the order of ``flatten``. None for containers other than those of the known call.

        Not every leaf of such a call is a leaf here: compare each with the known one.
        """
        # This runs at every replay.
        if len(args) != self._count or len(kwargs) != len(self._names) or not self._is_readable:
            return None
        if not kwargs and not self._containers:
            return args
        try:
            parts: list[Any] = [*args, *map(kwargs.__getitem__, self._names)]
            for at, node, count, keys in self._containers:
                value = parts[at]
                if type(value) is not node or len(value) != count:
                    return None
                parts.extend(value if keys is None else map(value.__getitem__, keys))
        except KeyError:
            return None
        return [parts[at] for at in self._order]


def _positions(at: int, opened: Mapping[int, range]) -> Iterator[int]:
    if at not in opened:
        yield at
    for inner in opened.get(at, ()):
        yield from _positions(inner, opened)
