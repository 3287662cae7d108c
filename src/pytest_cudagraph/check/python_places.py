"""The places where the Python of a model keeps numbers: attributes, slots, closures, globals, defaults, classes.

Wider than the walk of a snapshot, because a place is only read, or set for one call and set back. Only functions that
ran in a call are followed, so that the tables of libraries stay out.
"""

from __future__ import annotations

import array
import builtins
import contextvars
import ctypes
import functools
import io
import itertools
import mmap
import numbers
import os
import queue
import random
import sqlite3
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.shared_memory import SharedMemory
from types import CodeType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from pytest_cudagraph import pytree
from pytest_cudagraph.backends.capture_mode import replaced
from pytest_cudagraph.sources import origin_of
from pytest_cudagraph.state.frames import attributes_of, slots_of

_MOST_OBJECTS = 20_000
_MOST_ENTRIES = 64
"""Entries of a container or an array whose numbers are places. Longer ones are data, and only their length is one."""

_CACHED = type(functools.lru_cache(len))

_NUMBERS = ("builtins", "numpy", "fractions", "decimal")
"""Where the classes of numbers come from that can be set forward. A symbol of sympy is a number too."""

_PLAIN = (numbers.Number, str, bytes, torch.Tensor, type(None))

Write = Callable[[Any], object]
Child = tuple[str, Any, Write | None]


class Place(NamedTuple):
    """A number, or a text that tells whether something moved. ``write`` is None where nothing can set it."""

    value: Any
    write: Write | None


class RanCode:
    """What ran in a call: the model's functions with their globals, and the files that it opened to read."""

    def __init__(self) -> None:
        self.functions: dict[CodeType, dict[str, Any]] = {}
        self.files: dict[str, None] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch a call. Where a profiler holds Python's hook, only files are seen."""
        is_free = sys.getprofile() is None
        with replaced([(builtins, "open", self._opening), (io, "open", self._opening)]):
            if is_free:
                sys.setprofile(self._note)
            try:
                yield
            finally:
                if is_free:
                    sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and origin_of(frame.f_code.co_filename) != "machinery":
            self.functions[frame.f_code] = frame.f_globals

    def _opening(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if ("r" in mode or "+" in mode) and not str(file).endswith(".py"):
                self.files[str(file)] = None
            return original(file, mode, *args, **kwargs)

        return opened

    def constants(self) -> set[float]:
        """The numbers in the source of these functions: limits and periods are among them."""
        held = [constant for code in self.functions for constant in code.co_consts]
        held += [entry for constant in held if isinstance(constant, tuple) for entry in constant]
        return {number for number in held if type(number) in (int, float) and 1 < abs(number) <= 10**7}


def places_of(roots: Iterable[Any], ran: RanCode) -> dict[str, Place]:
    """Every place that can be reached now, by the name that a reader of the model knows."""
    places: dict[str, Place] = {}
    seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is used again during the walk
    waiting: deque[Child] = deque(("", root, None) for root in roots)
    waiting.extend(_globals(ran))
    places |= {f"os.environ[{key!r}]": Place(text, None) for key, text in os.environ.items()}
    while waiting and len(seen) < _MOST_OBJECTS:
        name, value, write = waiting.popleft()
        with suppress(Exception):  # a class of the user's may raise wherever it is asked
            place = _place(value, write)
            if place is not None:
                kind = "" if isinstance(value, numbers.Number) else f" ({type(value).__name__})"
                places.setdefault(f"{name}{kind}", place)
            if isinstance(value, _PLAIN) or id(value) in seen:
                continue
            if not isinstance(value, tuple):
                seen[id(value)] = value
            waiting.extend(_children(value, name, write, ran))
    return places


def _globals(ran: RanCode) -> Iterator[Child]:
    """The globals that the functions name, and the attributes of the project's modules that they name."""
    for code, namespace in ran.functions.items():
        for key in code.co_names:
            value = namespace.get(key)
            if isinstance(value, ModuleType):
                yield from _entries(vars(value), f"{key}.{{}}", () if _is_machinery(value.__name__) else code.co_names)
            elif value is not None:
                yield key, value, functools.partial(namespace.__setitem__, key)


def _place(value: Any, write: Write | None) -> Place | None:
    """The number in a value, or its length, or what shows that it moved."""
    if isinstance(value, bool):
        return None
    if isinstance(value, numbers.Number):
        return Place(value, write) if type(value).__module__ in _NUMBERS else None
    if isinstance(value, itertools.count):
        start = repr(value).removeprefix("count(").partition(",")[0].rstrip(")")
        with suppress(ValueError):
            return Place(int(start), write and (lambda number: write(itertools.count(number))))
        return None
    for kinds, sign in _SIGNS.items():
        if isinstance(value, kinds):
            with suppress(Exception):  # closed, or of another thread
                return Place(sign(value), _lengthening(value))
    if hasattr(value, "bit_generator"):  # of numpy, which may not be installed
        return Place(str(value.bit_generator.state), None)
    return Place(value.cache_info()[:2], None) if isinstance(value, _CACHED) else None


_SIGNS: dict[Any, Callable[[Any], Any]] = {
    (list, deque, dict, set, str, bytes): len,
    GeneratorType: lambda generator: (generator.gi_frame.f_lasti, repr(generator.gi_frame.f_locals)),
    mmap.mmap: lambda memory: bytes(memory[:_MOST_ENTRIES]),
    SharedMemory: lambda shared: bytes(shared.buf[:_MOST_ENTRIES]),
    sqlite3.Connection: lambda rows: rows.total_changes,
    random.Random: lambda generator: generator.getstate(),
    (itertools.cycle, map, filter, zip, enumerate): lambda iterator: object(),  # no position can be read
}
"""What shows that a value moved which is no number."""


def _lengthening(value: Any) -> Write | None:
    """Make a list or deque of numbers or None as long as asked, with its last entry; or as short."""
    if not isinstance(value, list | deque):
        return None

    def set_length(length: int) -> None:
        missing = length - len(value)
        if missing > 0:
            value.extend([value[-1]] * missing)
        for _ in range(-missing):
            value.pop()

    return set_length


def _children(value: Any, name: str, write: Write | None, ran: RanCode) -> Iterator[Child]:
    """What a value holds."""
    if isinstance(value, FunctionType):
        yield from _of_function(value, name, ran)
    elif isinstance(value, type):
        yield from () if _is_machinery(value.__module__) else _of_class(value)
    elif isinstance(value, contextvars.ContextVar):
        yield name, value.get(None), value.set
    elif isinstance(value, tuple | list | deque | dict | array.array) or pytree.is_array(value):
        yield from _of_container(value, name, write)
    elif isinstance(value, ctypes._SimpleCData):
        yield f"{name}.value", value.value, functools.partial(setattr, value, "value")
    elif isinstance(value, nn.Module):
        tables = ("_parameters", "_buffers", "_non_persistent_buffers_set", "training")
        yield from (child for child in _of_object(value, name) if child[0].rpartition(".")[2] not in tables)
    elif any(hasattr(value, part) for part in _WRAPPED) and isinstance(value, _WRAPPERS):
        yield from ((name, getattr(value, part, None), None) for part in _WRAPPED)
    elif isinstance(value, _OPENED) or not (isinstance(value, ModuleType) or _is_machinery(type(value).__module__)):
        yield from _of_object(value, name)


_WRAPPED = ("__self__", "__func__", "func", "args", "keywords", "fget", "__wrapped__")
_WRAPPERS = (MethodType, functools.partial, property, staticmethod, classmethod, _CACHED)
_OPENED = (
    SimpleNamespace, threading.local, queue.Queue, weakref.WeakKeyDictionary, weakref.WeakValueDictionary,
    torch.optim.lr_scheduler.LRScheduler,
)  # fmt: skip
"""Classes of the machinery whose attributes are the model's."""


def _of_function(function: FunctionType, name: str, ran: RanCode) -> Iterator[Child]:
    if ran.functions and function.__code__ not in ran.functions:
        return
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            yield variable, cell.cell_contents, functools.partial(setattr, cell, "cell_contents")
    defaults = functools.partial(setattr, function, "__defaults__")
    yield f"{function.__name__}.__defaults__", function.__defaults__, defaults
    yield from _entries(function.__kwdefaults__ or {}, f"{function.__name__}.{{}}")
    yield from _entries(function.__dict__, f"{function.__name__}.{{}}")


def _of_class(cls: type) -> Iterator[Child]:
    yield from ((base.__name__, base, None) for base in cls.__mro__[1:])
    for key, entry in list(vars(cls).items()):
        if not (key.startswith("__") and key.endswith("__") and key != "__call__"):
            yield f"{cls.__name__}.{key}", entry, functools.partial(type.__setattr__, cls, key)


def _of_container(value: Any, name: str, write: Write | None) -> Iterator[Child]:
    is_array = pytree.is_array(value)
    if is_array and not (value.flags.writeable and value.dtype.kind in "iuf"):
        return
    held = value.reshape(-1) if is_array else value
    entries = list(enumerate(held)) if is_array or isinstance(held, array.array) else pytree.entries_of(held)
    if len(entries) > _MOST_ENTRIES:
        return
    for key, entry in entries:
        if isinstance(value, tuple):
            step = f".{value._fields[key]}" if hasattr(value, "_fields") else f"[{key}]"
            yield f"{name}{step}", entry, write and functools.partial(_write_entry, value, key, write)
        else:
            yield f"{name}[{key!r}]", entry, functools.partial(held.__setitem__, key)
    if attributes_of(value):
        yield from _of_object(value, name)


def _write_entry(value: Any, position: int, write: Write, entry: Any) -> None:
    entries = [*value[:position], entry, *value[position + 1 :]]
    write(type(value)(*entries) if hasattr(value, "_fields") else tuple(entries))


def _of_object(value: Any, name: str) -> Iterator[Child]:
    prefix = f"{name}." if name else ""
    for key, entry in slots_of(value).items():
        yield f"{prefix}{key}", entry, functools.partial(object.__setattr__, value, key)
    held = value.__dict__ if isinstance(value, threading.local) else attributes_of(value)
    yield from _entries(held or {}, f"{prefix}{{}}")
    yield type(value).__name__, type(value), None


def _entries(held: Any, form: str, only: Iterable[str] | None = None) -> Iterator[Child]:
    for key, entry in list(held.items()):
        if only is None or key in only:
            yield form.format(key), entry, functools.partial(held.__setitem__, key)


def _is_machinery(module: str) -> bool:
    package = module.partition(".")[0]
    return package in sys.stdlib_module_names or package in ("torch", "numpy", "pytest", "_pytest", "pytest_cudagraph")
