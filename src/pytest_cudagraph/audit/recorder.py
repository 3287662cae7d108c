"""The dispatch mode that watches one eager call of a model."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_cudagraph import hazards, leaves
from pytest_cudagraph.audit.trace import Operation, Outside, Trace, storage_of
from pytest_cudagraph.backends.cpu.modes import QuietMode
from pytest_cudagraph.hazards import Refusal
from pytest_cudagraph.protocols import Backend
from pytest_cudagraph.sources import user_site

_TRANSPARENT = (torch.nn.Parameter, torch.nn.Buffer)
"""Subclasses in name only, without a dispatch of their own."""

_PLAIN = (bool, int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""What a graph keeps by value. Of a generator, a storage or a function only the kind can be told."""


class Recorder(QuietMode):
    """Writes one :class:`Trace`; ``known`` names the memory of inputs and state before the call."""

    supports_higher_order_operators = True

    def __init__(self, backend: Backend, known: Mapping[int, Outside], kept_alive: list[object]) -> None:
        super().__init__()
        self.trace = Trace(kept_alive=kept_alive, known=frozenset(known))
        self._backend = backend
        self._known = dict(known)
        self._made: dict[int, StorageWeakRef] = {}
        self._numbers: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._record(func, types, args, kwargs or {})

    def _record(self, func: Any, types: tuple[type, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # ``.data`` of a buffer comes with plain tensors among its types.
        self.trace.subclasses.update(
            kind.__name__ for kind in types if kind is not torch.Tensor and not issubclass(kind, _TRANSPARENT)
        )
        given = list(_tensors((*args, *kwargs.values())))
        refused = self._judge(func, args, kwargs, given)
        plain = [*args, *sorted(kwargs.items())]
        if _short_name(func) == "lift_fresh":
            plain.append(self._lift(args[0]))
        reads, writes = self._outside(given), self._outside(_written(func, args, kwargs))
        before = self._backend.rng_state() if _may_draw(func) else None
        result = func(*args, **kwargs)
        made = list(_tensors(result if isinstance(result, tuple | list) else (result,)))
        self._remember(made)
        self.trace.operations.append(
            Operation(
                name=str(func),
                scalars=tuple(_scalars(plain)),
                shapes=tuple(tuple(tensor.shape) for tensor in made),
                reads=reads,
                writes=writes,
                site=user_site(),
                refused=refused,
                draws=before is not None and not is_same(before, self._backend.rng_state()),
            )
        )
        return result

    def outside_of(self, tensor: torch.Tensor) -> Outside | None:
        """The outside memory a tensor lies in; None for what the call itself made."""
        found = self._outside([tensor])
        return found[0] if found else None

    def _judge(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[torch.Tensor]
    ) -> Refusal | None:
        found = hazards.refusal(func, args, kwargs, from_host=self._is_number) or hazards.remark(func, args, kwargs)
        if found is None or self._backend.kind != "cuda":
            return found
        # On a GPU an operation on CPU tensors alone is the host's own business: nothing waits for the device. Copying
        # to the device is not.
        is_local = found.id in ("host-sync", "dynamic-shape") or _short_name(func) == "lift_fresh"
        on_host_alone = bool(given) and all(tensor.device.type == "cpu" for tensor in given)
        return None if is_local and on_host_alone else found

    def _is_number(self, tensor: torch.Tensor) -> bool:
        storage = storage_of(tensor)
        return storage is not None and storage.cdata in self._numbers

    def _lift(self, tensor: torch.Tensor) -> Any:
        """Take note of a tensor made from data of the host; its number where it is one, which a graph freezes."""
        self._remember([tensor])
        storage = storage_of(tensor)
        if tensor.dim() != 0 or storage is None:
            return None
        self._numbers.add(storage.cdata)
        return tensor.item()

    def _remember(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = storage_of(tensor)
            if storage is not None and storage.cdata not in self._known:
                self._made.setdefault(storage.cdata, storage)

    def _outside(self, tensors: Iterable[torch.Tensor]) -> tuple[Outside, ...]:
        found: dict[int, Outside] = {}
        for tensor in tensors:
            storage = storage_of(tensor)
            if storage is not None and storage.cdata not in self._made:
                found[storage.cdata] = self._known.get(storage.cdata) or self._meet(tensor, storage)
        return tuple(found.values())

    def _meet(self, tensor: torch.Tensor, storage: StorageWeakRef) -> Outside:
        # A tensor nobody made under our eyes: from another thread, a global, numpy or a C++ extension.
        known = Outside(origin="foreign", name=f"a tensor of {tuple(tensor.shape)}", storage=storage.cdata)
        self._known[storage.cdata] = known
        self.trace.kept_alive.append(tensor)
        return known


class _RecorderBesideDynamo(Recorder):
    """The same where the compiler is loaded: it must not try to compile the recorder's own frames."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._record(func, types, args, kwargs or {})


def open_recorder(backend: Backend, known: Mapping[int, Outside], kept_alive: list[object]) -> Recorder:
    """The recorder for this process as it is now: with the compiler loaded or without."""
    recorder = _RecorderBesideDynamo if "torch._dynamo" in sys.modules else Recorder
    return recorder(backend, known, kept_alive)


def is_same(first: Any, second: Any) -> bool:
    """Whether two states of the generators (tensors in any nesting) are equal."""
    pairs = zip(leaves.flatten(first)[0], leaves.flatten(second)[0], strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _scalars(values: Iterable[Any]) -> Iterator[Any]:
    """Plain arguments in a form that compares: NaN equals NaN; what is not plain equals its like."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _scalars(value)
        elif isinstance(value, float | complex):
            yield repr(value)
        else:
            yield value if isinstance(value, _PLAIN) else type(value).__name__


def _short_name(func: Any) -> str:
    return str(getattr(func, "overloadpacket", func).__name__)


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    names, flag = _write_names(func)
    if not names and flag is None:
        return iter(())
    given = {**dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)), **kwargs}
    # Normalisation in training updates its statistics, which the schemas of most of its forms do not say.
    statistics = ("running_mean", "running_var") if flag is not None and given.get(flag) is True else ()
    return _tensors(given.get(name) for name in (*names, *statistics))


@functools.cache
def _write_names(func: Any) -> tuple[tuple[str, ...], str | None]:
    """The arguments that the schema marks as written, and the flag that makes a normalisation write too."""
    arguments = getattr(getattr(func, "_schema", None), "arguments", ())
    written = (argument for argument in arguments if argument.alias_info is not None and argument.alias_info.is_write)
    named = {argument.name for argument in arguments}
    flags = [flag for flag in ("training", "train", "use_input_stats") if flag in named and "running_mean" in named]
    return tuple(argument.name for argument in written), flags[0] if flags else None


@functools.cache
def _may_draw(func: Any) -> bool:
    return any(tag.name == "nondeterministic_seeded" for tag in getattr(func, "tags", ()))
