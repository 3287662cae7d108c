"""The trace of one call of a model, the results of all calls, and where two calls differ."""

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
from pytest_cudagraph.hazards import RawFinding
from pytest_cudagraph.protocols import Backend
from pytest_cudagraph.state import Changes
from pytest_cudagraph.units import plural
from pytest_cudagraph.values import Level, Site

TORCHS = "torch's default generator"


class Generators:
    """The states of torch's default generators, of Python's ``random`` and, if loaded, of ``numpy.random``."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._torch = backend.rng_state()
        self._python = random.getstate()
        self._numpy = _numpy_state()

    def moved(self) -> tuple[str, ...]:
        """The names of those whose state is different now."""
        moved = {
            TORCHS: not pytree.has_same_tensors(self._torch, self._backend.rng_state()),
            "Python's random": random.getstate() != self._python,
            "numpy.random": self._numpy is not None and not _is_same_numpy(self._numpy, _numpy_state()),
        }
        return tuple(name for name, has_moved in moved.items() if has_moved)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put them back at the end, also after an exception."""
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
"""The origin of memory that existed before the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideMemory:
    """Memory that existed before the call. ``storage`` identifies it while the trace lives."""

    origin: Origin
    name: str
    storage: int


class TracedOperation(NamedTuple):
    """One dispatched operation: its plain arguments, the shapes it made, the outside memory it read and wrote.

    A named tuple costs a fifth of a frozen dataclass, and each operation of each call makes one.
    """

    name: str
    scalars: tuple[Any, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    reads: tuple[OutsideMemory, ...] = ()
    writes: tuple[OutsideMemory, ...] = ()
    site: Site | None = None
    called_from: Site | None = None
    """The innermost line of the user's project, if ``site`` is a line of an installed library."""
    refused: RawFinding | None = None
    draws: bool = False
    """Whether the default generator moved."""

    def finding(self, hazard: str, text: str, level: Level = "error") -> RawFinding:
        """A finding at the line of this operation."""
        return RawFinding(id=hazard, text=text, level=level, site=self.site, called_from=self.called_from)


@dataclass(slots=True, kw_only=True)
class Trace:
    """One call, in order. It keeps outside memory alive, so that no other memory gets its address."""

    operations: list[TracedOperation] = field(default_factory=list)
    host_calls: list[tuple[int, RawFinding]] = field(default_factory=list)
    """Python calls that a capture refuses, each with the number of operations before it."""
    aliases: list[tuple[str, OutsideMemory]] = field(default_factory=list)
    """The names of output leaves that share memory with something outside, and that memory."""
    containers: list[tuple[str, TracedOperation | None]] = field(default_factory=list)
    """Changes to dicts and lists of the inputs, in words, and the operation that made the new tensor."""
    makers: dict[str, TracedOperation] = field(default_factory=dict)
    """For each name of the state that has a new tensor after the call: the operation that made it."""
    subclasses: set[str] = field(default_factory=set)
    """Tensor subclasses with their own dispatch. The audit does not see inside them."""
    kept_alive: list[object] = field(default_factory=list)
    known: frozenset[int] = frozenset()
    """The memory of inputs and state at the start of the call."""


def storage_of(tensor: torch.Tensor) -> StorageWeakRef | None:
    """A weak reference to a tensor's memory. While it lives, its ``cdata`` names no other memory."""
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    # Sparse, nested and opaque tensors have no single storage. torch raises one of these two.
    except (NotImplementedError, RuntimeError):
        return None


@dataclass(slots=True, kw_only=True)
class ProbeResults:
    """The results of all calls of an audit. A call that raised is None, with a line in ``not_judged``."""

    first: Trace
    """In the mode in which graphs are captured, which keeps composite operations whole."""
    changes: Changes
    """The changes of the first call to the state."""
    registered: frozenset[str]
    """The names of parameters and buffers among the state."""
    storages: dict[str, int | None]
    """The memory of every tensor of the state, by name."""
    generators: tuple[str, ...] = ()
    """The names of the random generators that the first call moved."""
    second: Trace | None = None
    third: Trace | None = None
    """The same inputs and seed again. Python's own state (counters, ``random``, clocks) runs on."""
    repeated: tuple[RawFinding, ...] = ()
    """The differences between the second call and the third."""
    warnings: tuple[RawFinding, ...] = ()
    """Branches on Python values that moved between these two calls, and reads of the date."""
    others: dict[str, Trace] = field(default_factory=dict)
    """Calls on other inputs of the same shapes, from the state of the first call, that differ from the first call."""
    refused: tuple[RawFinding, ...] = ()
    """The findings of the rules in the first call, and in a call under ``no_grad``, which splits composites."""
    elsewhere: dict[str, Trace] = field(default_factory=dict)
    """The calls at another batch size and on the branches that only a GPU takes, for the rules."""
    not_judged: list[str] = field(default_factory=list)


def differences(first: Trace, second: Trace) -> tuple[RawFinding, ...]:
    """The differences of two calls: operations, plain arguments, shapes, memory from outside.

    The comparison ends at the first other operation or shape, because later differences are its consequences.
    """
    return tuple(_walk(first, second))


def _walk(first: Trace, second: Trace) -> Iterator[RawFinding]:
    ones, others = first.operations, second.operations
    for one, other in zip(ones, others, strict=False):
        if one.name != other.name:
            # The finding points at the captured operation, because it follows the branch.
            where = f" (line {one.site.line}, then line {other.site.line})" if one.site and other.site else ""
            yield one.finding("control-flow", f"{one.name}, then {other.name}{where}")
            return
        yield from _at(one, other, first.known)
        if one.shapes != other.shapes:
            return
    if len(ones) != len(others):
        longer = ones if len(ones) > len(others) else others
        surplus = longer[min(len(ones), len(others))]
        counts = f"{plural(len(ones), 'operation')}, then {len(others)}"
        yield surplus.finding("control-flow", f"{counts}: {surplus.name} runs in one call only")


def _at(one: TracedOperation, other: TracedOperation, known: frozenset[int]) -> Iterator[RawFinding]:
    moved = tuple(_moved(one, other, known))
    changed = _changed_scalar(one, other)
    yield from moved
    if changed is not None:
        yield other.finding("baked-scalar", f"{one.name}: {changed}")
    elif one.shapes != other.shapes and not moved:  # another tensor may have another size, as a growing cache
        yield other.finding("dynamic-shape", f"{one.name} gives {_shapes_text(one)}, then {_shapes_text(other)}")


def _changed_scalar(one: TracedOperation, other: TracedOperation) -> str | None:
    if len(one.scalars) != len(other.scalars):
        return f"{plural(len(one.scalars), 'plain argument')}, then {len(other.scalars)}"
    pairs = zip(one.scalars, other.scalars, strict=True)
    return next((f"{before}, then {after}" for before, after in pairs if before != after), None)


def _moved(one: TracedOperation, other: TracedOperation, known: frozenset[int]) -> Iterator[RawFinding]:
    before = {outside.storage: outside.name for outside in one.reads if outside.origin != "input"}
    for outside in other.reads:
        if outside.origin == "input" or outside.storage in before:
            continue
        if outside.storage in known and outside.name not in before.values():
            # The second call chose another piece of the same state. Nothing has moved.
            names = f"{', '.join(before.values()) or 'nothing'}, then {outside.name}"
            yield other.finding("control-flow", f"{one.name} reads {names}")
            return
        hazard = "rebinds-state" if outside.origin == "state" else "foreign-tensor"
        yield other.finding(hazard, f"{one.name} reads {outside.name} at another address")


def _shapes_text(operation: TracedOperation) -> str:
    return ", ".join(str(shape) for shape in operation.shapes)
