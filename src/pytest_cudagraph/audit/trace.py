"""What one call of a model did, as plain facts, and where two calls differ."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_cudagraph import pytree
from pytest_cudagraph.hazards import Refusal
from pytest_cudagraph.protocols import Backend
from pytest_cudagraph.units import plural
from pytest_cudagraph.values import Site

TORCHS = "torch's default generator"


class Generators:
    """torch's default generators, Python's ``random`` and, where it is loaded, ``numpy.random``, as they were."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._torch = backend.rng_state()
        self._python = random.getstate()
        self._numpy = _numpy_state()

    def moved(self) -> tuple[str, ...]:
        """Those that stand elsewhere now, by name."""
        moved = {
            TORCHS: not pytree.has_same_tensors(self._torch, self._backend.rng_state()),
            "Python's random": random.getstate() != self._python,
            "numpy.random": self._numpy is not None and not _is_same_numpy(self._numpy, _numpy_state()),
        }
        return tuple(name for name, has_moved in moved.items() if has_moved)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put them back at the end, whatever happens."""
        with ExitStack() as stack:
            stack.callback(self._backend.set_rng_state, self._torch)
            stack.callback(random.setstate, self._python)
            if self._numpy is not None:
                stack.callback(sys.modules["numpy"].random.set_state, self._numpy)
            yield


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state()


def _is_same_numpy(first: Any, second: Any) -> bool:
    return first[2:] == second[2:] and bool((first[1] == second[1]).all())


Origin = Literal["input", "state", "foreign"]
"""Where memory comes from that existed before the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideMemory:
    """Memory that existed before the call; ``storage`` is its identity for as long as the trace lives."""

    origin: Origin
    name: str
    storage: int


class TracedOperation(NamedTuple):
    """One dispatched operation: its plain arguments, the shapes it made, the outside memory it read and wrote.

    A named tuple: it is made for every operation of every call, and costs a fifth of a frozen dataclass.
    """

    name: str
    scalars: tuple[Any, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    reads: tuple[OutsideMemory, ...] = ()
    writes: tuple[OutsideMemory, ...] = ()
    site: Site | None = None
    called_from: Site | None = None
    """The project's own line, where ``site`` is a line of an installed library."""
    refused: Refusal | None = None
    draws: bool = False
    """Whether the default generator moved."""


@dataclass(slots=True, kw_only=True)
class Trace:
    """One call, in order. It keeps alive what was outside, so that no address serves twice."""

    operations: list[TracedOperation] = field(default_factory=list)
    aliases: list[tuple[str, OutsideMemory]] = field(default_factory=list)
    """Output leaves, by name, that share memory with something outside."""
    containers: list[tuple[str, TracedOperation | None]] = field(default_factory=list)
    """What of the inputs' dicts and lists is not as it was given, in words, and what made the tensor that is there."""
    subclasses: set[str] = field(default_factory=set)
    """Tensor subclasses with a dispatch of their own, whose inside was not seen."""
    kept_alive: list[object] = field(default_factory=list)
    known: frozenset[int] = frozenset()
    """The memory of inputs and state as the call began."""


def storage_of(tensor: torch.Tensor) -> StorageWeakRef | None:
    """A weak reference to a tensor's memory, whose ``cdata`` is not reused while it lives; None for sparse ones."""
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    # Sparse, nested and opaque tensors have no one storage; torch says so with either class.
    except (NotImplementedError, RuntimeError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceDifference:
    """The hazard a difference shows, the line it shows at, and both sides of it."""

    id: str
    site: Site | None
    evidence: str
    called_from: Site | None = None


def differences(first: Trace, second: Trace) -> tuple[TraceDifference, ...]:
    """Where two calls part: other operations, other numbers, other shapes, other outside memory.

    What follows the first other operation or the first other shape is a consequence and stays unsaid.
    """
    return tuple(_walk(first, second))


def _walk(first: Trace, second: Trace) -> Iterator[TraceDifference]:
    ones, others = first.operations, second.operations
    for one, other in zip(ones, others, strict=False):
        if one.name != other.name:
            yield _forked(one, other)
            return
        yield from _at(one, other, first.known)
        if one.shapes != other.shapes:
            return
    if len(ones) != len(others):
        longer = ones if len(ones) > len(others) else others
        surplus = longer[min(len(ones), len(others))]
        counts = f"{plural(len(ones), 'operation')}, then {len(others)}"
        yield _at_line("control-flow", surplus, f"{counts}: {surplus.name} runs in one call only")


def _forked(one: TracedOperation, other: TracedOperation) -> TraceDifference:
    # The operation that was captured stands where the branch was taken.
    where = f" (line {one.site.line}, then line {other.site.line})" if one.site and other.site else ""
    return _at_line("control-flow", one, f"{one.name}, then {other.name}{where}")


def _at(one: TracedOperation, other: TracedOperation, known: frozenset[int]) -> Iterator[TraceDifference]:
    moved = tuple(_moved(one, other, known))
    changed = _changed_scalar(one, other)
    yield from moved
    if changed is not None:
        yield _at_line("baked-scalar", other, f"{one.name}: {changed}")
    elif one.shapes != other.shapes and not moved:  # another tensor may well be larger: a cache that grows
        shapes = f"{_shapes_text(one)}, then {_shapes_text(other)}"
        yield _at_line("dynamic-shape", other, f"{one.name} gives {shapes}")


def _at_line(hazard: str, operation: TracedOperation, evidence: str) -> TraceDifference:
    return TraceDifference(id=hazard, site=operation.site, called_from=operation.called_from, evidence=evidence)


def _changed_scalar(one: TracedOperation, other: TracedOperation) -> str | None:
    if len(one.scalars) != len(other.scalars):
        return f"{plural(len(one.scalars), 'plain argument')}, then {len(other.scalars)}"
    for before, after in zip(one.scalars, other.scalars, strict=True):
        if before != after:
            return f"{before}, then {after}"
    return None


def _moved(one: TracedOperation, other: TracedOperation, known: frozenset[int]) -> Iterator[TraceDifference]:
    before = {outside.storage: outside.name for outside in one.reads if outside.origin != "input"}
    for outside in other.reads:
        if outside.origin == "input" or outside.storage in before:
            continue
        if outside.storage in known and outside.name not in before.values():
            # Another piece of the same state: not moved, chosen.
            names = f"{', '.join(before.values()) or 'nothing'}, then {outside.name}"
            yield _at_line("control-flow", other, f"{one.name} reads {names}")
            return
        hazard = "rebinds-state" if outside.origin == "state" else "foreign-tensor"
        yield _at_line(hazard, other, f"{one.name} reads {outside.name} at another address")


def _shapes_text(operation: TracedOperation) -> str:
    return ", ".join(str(shape) for shape in operation.shapes)
