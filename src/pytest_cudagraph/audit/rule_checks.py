"""The rules of a capture, applied to each operation of one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_cudagraph import hazards
from pytest_cudagraph.audit.trace import storage_of
from pytest_cudagraph.backends.capture_mode import storage_key, tensors_of
from pytest_cudagraph.backends.cpu.operators import Traits, traits_of
from pytest_cudagraph.hazards import RawFinding
from pytest_cudagraph.protocols import Backend
from pytest_cudagraph.sources import user_frame, user_sites
from pytest_cudagraph.sources.syntax import names_host

_PLAIN = (bool, int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""A graph keeps these by value. Generators, storages and functions compare by their class only."""

_PLAIN_EXACT = frozenset(_PLAIN)

NUMBER_TAKERS = ("aten.index_put_", "aten.masked_fill", "aten.fill_")
"""Operations that may take a Python number that torch has made into a tensor."""


class OperatorInfo(NamedTuple):
    """The facts of one operator that do not depend on its arguments."""

    func: Any
    """Kept, so that no other operator gets the same ``id``."""
    name: str
    short_name: str
    traits: Traits | None
    """None for a higher-order operator, which has no schema."""
    is_judged: bool
    may_draw: bool
    is_lift: bool
    makes_legal: bool
    """Whether a refusal at the same line may be legal because of this operation."""

    def written(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors that a call with these arguments writes to."""
        return [] if self.traits is None else self.traits.written(args, kwargs)


class Operators(dict[int, OperatorInfo]):
    """The facts of each operator by its ``id``. To hash an operator costs more than everything that is asked of it."""

    def of(self, func: Any) -> OperatorInfo:
        """The facts of one operator."""
        return self.get(id(func)) or self._learn(func)

    def _learn(self, func: Any) -> OperatorInfo:
        name = str(func)
        traits = traits_of(func) if isinstance(func, torch._ops.OpOverload) else None
        self[id(func)] = info = OperatorInfo(
            func=func,
            name=name,
            short_name=str(getattr(func, "overloadpacket", func).__name__),
            traits=traits,
            is_judged=hazards.is_judged(func),
            may_draw=traits is not None and traits.random,
            is_lift=traits is not None and traits.makes_constant,
            makes_legal=name.startswith((*NUMBER_TAKERS, "aten.one_hot")),
        )
        return info


def sort_out(
    info: OperatorInfo, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[list[Any], list[torch.Tensor]]:
    """The arguments in a form that compares, and the tensors among them. A tensor compares by its class only.

    For a tensor made from a Python number, the number comes last.
    """
    scalars: list[Any] = []
    tensors: list[torch.Tensor] = []
    _sort_out(args, scalars, tensors)
    if kwargs:
        _sort_out(sorted(kwargs.items()), scalars, tensors)
    if info.is_lift:
        scalars.append(_scalar(_number_of(args[0])))
    return scalars, tensors


def _sort_out(values: Iterable[Any], scalars: list[Any], tensors: list[torch.Tensor]) -> None:
    for value in values:
        kind = type(value)
        if kind in _PLAIN_EXACT:
            scalars.append(value)
        elif isinstance(value, torch.Tensor):
            tensors.append(value)
            scalars.append(kind.__name__)
        elif isinstance(value, list | tuple):
            _sort_out(value, scalars, tensors)
        else:
            scalars.append(_scalar(value))


def _scalar(value: Any) -> Any:
    """A plain argument in a form that compares: NaN equals NaN, and other objects compare by their class."""
    if isinstance(value, float | complex):
        return repr(value)
    return value if isinstance(value, _PLAIN) else type(value).__name__


_read_number = torch.Tensor.item  # the original: the watch of host calls replaces it later


def _number_of(tensor: torch.Tensor) -> Any:
    """The number in a tensor without dimensions, or None."""
    return _read_number(tensor) if tensor.dim() == 0 and storage_key(tensor) is not None else None


_TAKES_BOTH = frozenset(
    "_pack_padded_sequence pack_padded_sequence tensor_split ctc_loss _ctc_loss lstm gru rnn_tanh rnn_relu".split()
)
"""Operations that take some of their arguments (lengths, sections) on the host."""


class _Made(NamedTuple):
    """Memory that may lie on the host. ``origin`` is the line that creates it there by name."""

    storage: StorageWeakRef
    origin: RawFinding | None


class Placement:
    """The places of the tensors of one call, as far as they are certain. ``device``: memory of inputs and state."""

    def __init__(self, device: Iterable[int]) -> None:
        self._device: set[int | None] = set(device)
        self._made: dict[int | None, _Made] = {}

    def judge(self, name: str, given: Sequence[torch.Tensor]) -> RawFinding | None:
        """The refusal of an operation that takes a host tensor together with device tensors, at the line that made it.

        CUDA takes a tensor without dimensions by value.
        """
        if not self._made or name in _TAKES_BOTH or not self._touches_device(given):
            return None
        origin = self._origin(tensor for tensor in given if tensor.dim() > 0)
        return origin and replace(origin, text=f"{origin.text}, but {name} takes it together with device tensors")

    def remember(self, info: OperatorInfo, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        """Note where an operation puts its results: where its tensors lie, or where the source says."""
        if self._touches_device(given):
            self._device.update(map(storage_key, made))
            return
        origin = self._origin(given) if given else _host_origin(info)
        for tensor in made:
            storage = storage_of(tensor)
            if storage is not None:
                self._made[storage.cdata] = _Made(storage, origin)

    def _touches_device(self, given: Sequence[torch.Tensor]) -> bool:
        keys = map(storage_key, given)
        return any(key in self._device and key not in self._made for key in keys)

    def _origin(self, given: Iterable[torch.Tensor]) -> RawFinding | None:
        made = (self._made.get(storage_key(tensor)) for tensor in given)
        return next((source.origin for source in made if source is not None and source.origin is not None), None)


def _host_origin(info: OperatorInfo) -> RawFinding | None:
    if not names_host(user_frame(), info.short_name):
        return None
    operation = str(getattr(info.func, "overloadpacket", info.func))
    text = "the source creates this tensor on the host"
    return RawFinding(id="host-data", text=text, operation=operation, **user_sites()._asdict())


class RuleChecker:
    """Judges each operation. It remembers which tensors were Python numbers and which the source puts on the host."""

    def __init__(self, backend: Backend, device: Iterable[int]) -> None:
        self._is_gpu = backend.kind == "cuda"
        self._placement = None if self._is_gpu else Placement(device)
        self._numbers: dict[int | None, object] = {}

    def judge(self, info: OperatorInfo, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RawFinding | None:
        """The finding of the rules in an operation. It has a line only if that is not the running line."""
        if info.is_lift:
            self._remember_number(args[0])
        found = hazards.judge(info.func, args, kwargs, self._is_number) if info.is_judged else None
        error = found if found is not None and found.level == "error" else None
        if self._placement is not None:
            return error or self._placement.judge(info.short_name, _given(args, kwargs)) or found
        # On a GPU an operation on CPU tensors alone does not wait for the device. A copy to the device does.
        is_local = error is not None and (error.id in ("host-sync", "dynamic-shape") or info.is_lift)
        return None if is_local and _lies_on_host(_given(args, kwargs)) else found

    def place(
        self, info: OperatorInfo, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: Sequence[torch.Tensor]
    ) -> None:
        """Note where an operation puts its results."""
        if self._placement is not None:
            self._placement.remember(info, _given(args, kwargs), made)

    def _remember_number(self, tensor: torch.Tensor) -> None:
        storage = storage_of(tensor)
        if tensor.dim() == 0 and storage is not None:
            self._numbers[storage.cdata] = storage

    def _is_number(self, tensor: torch.Tensor) -> bool:
        return storage_key(tensor) in self._numbers


def _given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    return list(tensors_of((args, kwargs)))


def _lies_on_host(given: Sequence[torch.Tensor]) -> bool:
    return bool(given) and all(tensor.device.type == "cpu" for tensor in given)
