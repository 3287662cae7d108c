"""Find what a model holds: tensors, plain values and containers, by the names that a user would use.

The walk enters modules, dict, list, tuple, deque, objects with ``__dict__`` or ``__slots__``, bound methods,
``functools.partial`` and variables that functions close over. It does not enter globals, classes and sets. It also does
not enter objects of torch, the standard library and the test framework: they change on their own (compiler caches,
locks, fixtures) and must not be restored.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from pytest_cudagraph import pytree
from pytest_cudagraph.state.frames import (
    CellFrame,
    DequeFrame,
    DictFrame,
    Frame,
    ListFrame,
    SlotsFrame,
    attributes_of,
    slots_of,
)
from pytest_cudagraph.state.storages import is_addressable

_MAX_DEPTH = 8
"""Levels of containers below a module. A cache has 4. Deeper ones are data, not state."""

_MAX_ENTRIES = 4096
"""Entries of one container. Longer ones are vocabularies and data sets, not state."""

_PLAIN = (
    int, float, complex, str, bytes, bool, type(None), Enum,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
)  # fmt: skip
_PLAIN_EXACT = frozenset(_PLAIN)
_MAX_VALUE_CHARS = 60
_MODULE_TABLES = ("_parameters", "_buffers", "_modules")
_FORWARD_HOOKS = frozenset(key for key in nn.Module().__dict__ if key.startswith("_forward_"))
"""Tables to put back with the attributes: a model notes in one that it has registered a hook."""
_MODULE_OWN = frozenset(nn.Module().__dict__) - frozenset(_MODULE_TABLES) | {"_compiled_call_impl"}
_NOT_FOLLOWED = sys.stdlib_module_names | set(
    "torch functorch triton numpy pytest _pytest pluggy pytest_cudagraph".split()
)
_OPAQUE = (type, ModuleType, BuiltinFunctionType, torch.Generator, set, frozenset)


class View:
    """What a model holds at one moment. ``tensors`` lists a tied tensor under each name. Nothing is copied."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.plain: dict[str, Any] = {}
        self.lengths: dict[str, int] = {}
        self.entries: set[str] = set()
        """Names in ``plain`` that are entries of a container. Its length shows when they come or go."""
        self.training: dict[str, bool] = {}
        self.frames: list[Frame] = []
        self.not_seen: list[str] = []
        self.is_framed = True
        """Whether ``frames`` hold everything that the walk has met. Then nothing is new while they are the same."""


def look_at(model: Any, extras: Iterable[tuple[str, Any]] = ()) -> View:
    """Everything reachable from ``model`` (names as in ``named_parameters``) and from the named extras."""
    walk = _Walk()
    walk.visit(model, "", 0)
    for name, extra in extras:
        walk.visit(extra, name, 0)
    return walk.view


def modules_of(model: Callable[..., Any]) -> list[nn.Module]:
    """The outermost modules of a callable: itself, bound to it, closed over, or in its attributes."""
    walk = _Walk(outermost_only=True)
    walk.visit(model, "", 0)
    return walk.modules


class _Walk:
    def __init__(self, *, outermost_only: bool = False) -> None:
        self.view = View()
        self.modules: list[nn.Module] = []
        self._outermost_only = outermost_only
        self._seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is reused during the walk

    def visit(self, value: Any, name: str, depth: int) -> None:
        if type(value) in _PLAIN_EXACT:
            self.view.plain[name] = value
            return
        try:
            self._visit(value, name, depth)
        # The class may be of any library, and its code may raise where only this walk looks.
        except Exception as error:
            raised = f"{type(error).__name__} in {type(value).__name__}, as this plugin looked at it"
            self.view.not_seen.append(f"{name} ({raised})")
            self.view.is_framed = False

    def _visit(self, value: Any, name: str, depth: int) -> None:
        if isinstance(value, _PLAIN):
            self.view.plain[name] = value
        elif isinstance(value, torch.Tensor):
            self._tensor(value, name, depth)
        elif id(value) not in self._seen:
            self._seen[id(value)] = value
            if isinstance(value, nn.Module):
                self._module(value, name)
            elif not isinstance(value, _OPAQUE):
                self._container(value, name, depth + 1)

    def _tensor(self, tensor: torch.Tensor, name: str, depth: int) -> None:
        if hasattr(tensor, "__tensor_flatten__"):  # a wrapper (quantized, distributed) around the tensors with data
            self.view.is_framed = False
            for inner in tensor.__tensor_flatten__()[0]:
                self.visit(getattr(tensor, inner), _dotted(name, inner), depth + 1)
        elif is_addressable(tensor):
            self.view.tensors[name] = tensor
        else:
            self.view.not_seen.append(name)

    def _module(self, module: nn.Module, name: str) -> None:
        self.modules.append(module)
        if self._outermost_only:
            return
        own = module.__dict__
        self.view.training[name] = module.training
        self.view.frames.append(DictFrame(own, dict(own)))
        if isinstance(module, torch.jit.ScriptModule):  # its tensors are in C++, not in the tables
            self.view.is_framed = False
            self._members([*module.named_parameters(), *module.named_buffers()], name, 0)
        for key, value in list(own.items()):
            if key in _MODULE_TABLES and isinstance(value, dict):
                self.view.frames.append(DictFrame(value, dict(value)))
                self._members(value.items(), name, 0)
            elif key in _FORWARD_HOOKS:
                self.view.frames.append(DictFrame(value, dict(value)))
            elif key not in _MODULE_OWN:
                self.visit(value, _dotted(name, key), 0)

    def _container(self, value: Any, name: str, depth: int) -> None:
        if depth > _MAX_DEPTH:
            self.view.not_seen.append(name)
        elif isinstance(value, dict | list | tuple | deque):
            self._collection(value, name, depth)
        elif isinstance(value, MethodType):
            self.visit(value.__self__, name, depth)
            self.visit(value.__func__, name, depth)
        elif isinstance(value, functools.partial):
            self.visit(value.func, name, depth)
            self.visit(value.args, _dotted(name, "args"), depth)
            self.visit(value.keywords, _dotted(name, "keywords"), depth)
        elif isinstance(value, FunctionType):
            self._function(value, name, depth)
        elif _is_followed(value.__class__):
            self._object(value, name, depth)

    def _collection(self, value: Any, name: str, depth: int) -> None:
        entries = pytree.entries_of(value)
        if not isinstance(value, tuple):
            self.view.lengths[name] = len(entries)
        if len(entries) > _MAX_ENTRIES:
            self.view.not_seen.append(name)
            self.view.is_framed = False
            return
        if isinstance(value, dict):
            self.view.frames.append(DictFrame(value, dict(entries)))
        elif isinstance(value, list):
            self.view.frames.append(ListFrame(value, [entry for _, entry in entries]))
        elif isinstance(value, deque):
            self.view.frames.append(DequeFrame(value, [entry for _, entry in entries]))
        for key, entry in entries:
            step = f"{name}[{key!r}]"
            self.view.entries.add(step)
            self.visit(entry, step, depth)
        if attributes_of(value):
            self._object(value, name, depth)

    def _function(self, function: FunctionType, name: str, depth: int) -> None:
        if _package(function.__module__) in _NOT_FOLLOWED or not function.__closure__:
            return
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True):
            try:
                contents = cell.cell_contents
            except ValueError:  # not assigned yet
                self.view.is_framed = False
                continue
            self.view.frames.append(CellFrame(cell, contents))
            self.visit(contents, _dotted(name, variable), depth)

    def _object(self, value: Any, name: str, depth: int) -> None:
        attributes = attributes_of(value)
        if attributes is not None:
            self.view.frames.append(DictFrame(attributes, dict(attributes)))
            self._members(list(attributes.items()), name, depth)
        slots = slots_of(value)
        if slots:
            self.view.frames.append(SlotsFrame(value, slots))
            self._members(slots.items(), name, depth)

    def _members(self, members: Iterable[tuple[str, Any]], name: str, depth: int) -> None:
        for key, value in members:
            self.visit(value, _dotted(name, key), depth)


def _dotted(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


@functools.lru_cache(maxsize=1024)
def _is_followed(cls: Any) -> bool:
    return issubclass(cls, SimpleNamespace) or _package(cls.__module__) not in _NOT_FOLLOWED


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


def plain_changes(old: View, now: View) -> list[str]:
    """Changed plain values and lengths of containers: ``steps: 3 -> 4``, ``len(history): 1 -> 2``."""
    found: list[str] = []
    for name, value in old.plain.items():
        if name in now.plain:
            if not _is_equal(value, now.plain[name]):
                found.append(f"{name}: {_text(value)} -> {_text(now.plain[name])}")
        elif name not in now.tensors and name not in old.entries:
            found.append(f"{name}: {_text(value)} -> {'another object' if name in now.lengths else 'gone'}")
    new = [name for name in now.plain if name not in old.plain]
    reported = old.tensors.keys() | now.entries
    found += [f"{name}: not there -> {_text(now.plain[name])}" for name in new if name not in reported]
    both = [(name, length, now.lengths[name]) for name, length in old.lengths.items() if name in now.lengths]
    return found + [f"len({name}): {before} -> {after}" for name, before, after in both if before != after]


def training_changes(old: View, now: View) -> list[str]:
    """Modules whose training flag changed: ``encoder.dropout: False -> True``."""
    both = [(name, flag, now.training[name]) for name, flag in old.training.items() if name in now.training]
    return [f"{name or 'model'}: {before} -> {after}" for name, before, after in both if before != after]


def _is_equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    return bool(one == other) or (one != one and other != other)


def _text(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}..."
