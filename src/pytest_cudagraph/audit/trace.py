"""What one call of a model did, as plain facts: the operations in order, and the memory they touched."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_cudagraph.hazards import Refusal
from pytest_cudagraph.values import Site

Origin = Literal["input", "state", "foreign"]
"""Where memory comes from that existed before the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """Memory that existed before the call; ``storage`` is its identity for as long as the trace lives."""

    origin: Origin
    name: str
    storage: int


class Operation(NamedTuple):
    """One dispatched operation: its plain arguments, the shapes it made, the outside memory it read and wrote.

    A named tuple: it is made for every operation of every call, and costs a fifth of a frozen dataclass.
    """

    name: str
    scalars: tuple[Any, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    reads: tuple[Outside, ...] = ()
    writes: tuple[Outside, ...] = ()
    site: Site | None = None
    called_from: Site | None = None
    """The project's own line, where ``site`` is a line of an installed library."""
    refused: Refusal | None = None
    draws: bool = False
    """Whether the default generator moved."""


@dataclass(slots=True, kw_only=True)
class Trace:
    """One call, in order. It keeps alive what was outside, so that no address serves twice."""

    operations: list[Operation] = field(default_factory=list)
    aliases: list[tuple[str, Outside]] = field(default_factory=list)
    """Output leaves, by name, that share memory with something outside."""
    containers: list[tuple[str, Operation | None]] = field(default_factory=list)
    """What of the inputs' dicts and lists is not as it was given, in words, and what made the tensor that is there."""
    subclasses: set[str] = field(default_factory=set)
    """Tensor subclasses with a dispatch of their own, whose inside was not seen."""
    kept_alive: list[object] = field(default_factory=list)
    known: frozenset[int] = frozenset()
    """The memory of inputs and state as the call began."""


def identity_of(tensor: torch.Tensor) -> int:
    """What tells a tensor's memory from others as long as something refers to it; 0 for sparse and opaque ones."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def storage_of(tensor: torch.Tensor) -> StorageWeakRef | None:
    """A weak reference to a tensor's memory, whose ``cdata`` is not reused while it lives; None for sparse ones."""
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    # Sparse, nested and opaque tensors have no one storage; torch says so with either class.
    except (NotImplementedError, RuntimeError):
        return None
