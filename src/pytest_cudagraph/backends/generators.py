"""The random generators that a model holds besides the default one."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from pytest_cudagraph import pytree

_LEAVES = (type, ModuleType, torch.Tensor, str, bytes, int, float, complex, bool, type(None))


def generators_of(device: str, *roots: Any, limit: int = 100_000) -> list[torch.Generator]:
    """The ``torch.Generator`` objects of one device that are reachable from ``roots``, each once.

    Follows attributes, containers, closures, bound methods, partials, and the globals that a function names. Visits
    at most ``limit`` objects, so that a model is searched and a whole program is not.
    """
    wanted = torch.device(device)
    found: dict[int, torch.Generator] = {}
    seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is used again
    waiting = list(roots)
    while waiting and len(seen) < limit:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, _LEAVES):
            continue
        seen[id(value)] = value
        if not isinstance(value, torch.Generator):
            waiting.extend(_held_by(value))
        # torch.Generator("cuda") has no index. It draws on whichever GPU is current.
        elif value.device.type == wanted.type and value.device.index in (None, wanted.index):
            found[id(value)] = value
    return list(found.values())


GeneratorStates = list[tuple[torch.Generator, torch.Tensor]]


def states_of(generators: Iterable[torch.Generator]) -> GeneratorStates:
    """Each generator with its present state."""
    return [(generator, generator.get_state()) for generator in generators]


def set_states(states: GeneratorStates) -> None:
    """Restore what :func:`states_of` returned."""
    for generator, state in states:
        generator.set_state(state)


@contextmanager
def states_kept(generators: Iterable[torch.Generator]) -> Iterator[None]:
    """Restore the states of the generators after the block, which draws from them."""
    states = states_of(generators)
    try:
        yield
    finally:
        set_states(states)


def _held_by(value: Any) -> Iterable[Any]:
    if isinstance(value, dict | list | tuple | set | frozenset):
        return [entry for _, entry in pytree.entries_of(value)]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    return _held_by_function(value) if isinstance(value, FunctionType) else _attributes(value)


def _held_by_function(function: FunctionType) -> list[Any]:
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    # Other globals than generators and modules would lead through the whole program.
    named = (function.__globals__.get(name) for name in function.__code__.co_names)
    return [
        *cells,
        *(function.__defaults__ or ()),
        *(value for value in named if isinstance(value, torch.Generator | torch.nn.Module)),
    ]


def _attributes(value: Any) -> list[Any]:
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return []
    return list(held.values()) if isinstance(held, dict) else []


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a variable that is not bound yet
        return False
