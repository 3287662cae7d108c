"""How values of each class are split into children, joined again, and named in a path."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Sequence
from enum import Enum
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree

Split = Callable[[Any], tuple[Sequence[Any], Any]]
Join = Callable[[Any, Any, list[Any]], Any]
Steps = Callable[[Any, int], list[str]]


class Node(NamedTuple):
    """How values of one class are split (children, context), joined, and named in a path."""

    split: Split
    join: Join
    steps: Steps


class KeyOrder(tuple[Any, ...]):
    """Dict keys as written, for rebuilding. All key orders are equal, so they do not affect equality of structures.

    Leaves of a dict are sorted by key, so that the order of keyword arguments does not matter.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeyOrder)

    def __hash__(self) -> int:
        return 0


def known_node(cls: Any) -> Node:
    """Like :func:`node_of`, for the class of a structure. Raises :class:`TypeError` if its instances are leaves."""
    node = node_of(cls)
    if node is None:
        raise TypeError(f"{cls.__name__} is not a node of a structure")
    return node


@lru_cache(maxsize=1024)
def node_of(cls: Any) -> Node | None:
    """How instances of ``cls`` are split. None for leaves. The cache is bounded, to free classes of past tests."""
    if cls in _EXACT:
        return _EXACT[cls]
    if issubclass(cls, torch.Tensor | torch.nn.Module | torch.Size | Enum):
        return None
    if issubclass(cls, tuple):
        return _tuple_node(cls)
    if issubclass(cls, dict):
        return _MAPPING
    if dataclasses.is_dataclass(cls) or issubclass(cls, UserDict | SimpleNamespace):
        return _OBJECT
    if cls in _pytree.SUPPORTED_NODES:
        return _REGISTERED
    return _LIST_LIKE if issubclass(cls, list) else None


def _tuple_node(cls: type[tuple[Any, ...]]) -> Node | None:
    if hasattr(cls, "_fields"):
        return _NAMED_TUPLE
    if hasattr(cls, "n_sequence_fields"):
        return _STRUCT_SEQUENCE
    if cls in _pytree.SUPPORTED_NODES:
        return _REGISTERED
    return Node(_split_sequence, lambda cls, _, children: tuple.__new__(cls, children), _positions)


def _split_sequence(value: Sequence[Any]) -> tuple[Sequence[Any], Any]:
    return value, None


def _positions(_: Any, count: int) -> list[str]:
    return [f"[{position}]" for position in range(count)]


def _split_dict(value: dict[Any, Any]) -> tuple[Sequence[Any], Any]:
    order = KeyOrder(value)
    try:
        keys = tuple(sorted(order))
    except TypeError:  # keys of several types cannot be sorted
        keys = tuple(order)
    return [value[key] for key in keys], (keys, order)


def _join_dict(_: Any, context: Any, children: list[Any]) -> dict[Any, Any]:
    keys, order = context
    by_key = dict(zip(keys, children, strict=True))
    return by_key if order[:] == keys else {key: by_key[key] for key in order}


def _split_mapping(value: dict[Any, Any]) -> tuple[Sequence[Any], Any]:
    """Items, then other attributes. A ModelOutput holds a field as both, and an unset field as attribute only."""
    keys = tuple(dict.keys(value))
    attributes = {name: getattr(value, name) for name in _attribute_names(value)}
    twins = tuple(n for n, a in attributes.items() if n in keys and a is dict.__getitem__(value, n))
    names = tuple(name for name in attributes if name not in twins)
    children = [*(dict.__getitem__(value, key) for key in keys), *(attributes[name] for name in names)]
    return children, (keys, names, twins, getattr(value, "default_factory", None))


def _join_mapping(cls: Any, context: Any, children: list[Any]) -> Any:
    keys, names, twins, default_factory = context
    # Do not run __init__, __post_init__ or an overridden __setitem__: they ran for the original.
    value = cls.__new__(cls)
    if isinstance(value, defaultdict):
        value.default_factory = default_factory
    base: Any = OrderedDict if isinstance(value, OrderedDict) else dict
    for key, child in zip(keys, children[: len(keys)], strict=True):
        base.__setitem__(value, key, child)
    for name, child in zip(names, children[len(keys) :], strict=True):
        object.__setattr__(value, name, child)
    for name in twins:
        object.__setattr__(value, name, base.__getitem__(value, name))
    return value


def _mapping_steps(context: Any, _: int) -> list[str]:
    return [*(f"[{key!r}]" for key in context[0]), *(f".{name}" for name in context[1])]


def _attribute_names(value: Any) -> list[str]:
    fields = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    others = [name for name in getattr(value, "__dict__", {}) if name not in fields]
    return [name for name in (*fields, *others) if hasattr(value, name)]


def _split_object(value: Any) -> tuple[Sequence[Any], Any]:
    names = tuple(_attribute_names(value))
    return [getattr(value, name) for name in names], names


def _join_object(cls: Any, names: Any, children: list[Any]) -> Any:
    value = cls.__new__(cls)  # not __init__: see _join_mapping
    for name, child in zip(names, children, strict=True):
        object.__setattr__(value, name, child)
    return value


def _join_list(cls: Any, names: Any, children: list[Any]) -> Any:
    value = cls.__new__(cls)
    list.extend(value, children[: len(children) - len(names)])
    for name, child in zip(names, children[len(children) - len(names) :], strict=True):
        object.__setattr__(value, name, child)
    return value


def _split_list_like(value: list[Any]) -> tuple[Sequence[Any], Any]:
    names = tuple(_attribute_names(value))
    return [*list.__iter__(value), *(getattr(value, name) for name in names)], names


def _list_steps(names: Any, count: int) -> list[str]:
    return [*_positions(None, count - len(names)), *(f".{name}" for name in names)]


def _split_registered(value: Any) -> tuple[Sequence[Any], Any]:
    return _pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)


def _join_registered(cls: Any, context: Any, children: list[Any]) -> Any:
    return _pytree.SUPPORTED_NODES[cls].unflatten_fn(children, context)


def _split_fields(value: Any) -> tuple[Sequence[Any], Any]:
    return value, type(value)._fields


def _split_struct_sequence(value: Any) -> tuple[Sequence[Any], Any]:
    return value, type(value).__match_args__


def _dotted(names: Any, _: int) -> list[str]:
    return [f".{name}" for name in names]


_NAMED_TUPLE = Node(_split_fields, lambda cls, _, children: cls._make(children), _dotted)
_STRUCT_SEQUENCE = Node(_split_struct_sequence, lambda cls, _, children: cls(children), _dotted)
_MAPPING = Node(_split_mapping, _join_mapping, _mapping_steps)
_OBJECT = Node(_split_object, _join_object, _dotted)
_LIST_LIKE = Node(_split_list_like, _join_list, _list_steps)
_REGISTERED = Node(_split_registered, _join_registered, _positions)
_EXACT: dict[type, Node] = {
    tuple: Node(_split_sequence, lambda _, __, children: tuple(children), _positions),
    list: Node(_split_sequence, lambda _, __, children: children, _positions),
    dict: Node(_split_dict, _join_dict, lambda context, _: [f"[{key!r}]" for key in context[0]]),
}


def entries_of(value: Any) -> list[tuple[Any, Any]]:
    """The keys and entries of a dict, list, tuple, deque or set, without the code of its class.

    A class may forbid to count its entries.
    """
    if isinstance(value, dict):
        return [(key, dict.__getitem__(value, key)) for key in dict.keys(value)]
    kinds: tuple[Any, ...] = (list, tuple, deque, set, frozenset)
    kind = next(kind for kind in kinds if isinstance(value, kind))
    return list(enumerate(kind.__iter__(value)))
