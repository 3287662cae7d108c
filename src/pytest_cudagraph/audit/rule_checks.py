"""The rules of a capture, applied to each operation of one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_cudagraph import hazards
from pytest_cudagraph.audit.trace import storage_of
from pytest_cudagraph.backends.capture_mode import storage_key, tensors_of
from pytest_cudagraph.backends.cpu.operators import Traits, traits_of
from pytest_cudagraph.backends.placement import HOST_DRAW_TEXT, Placement, tensors_read
from pytest_cudagraph.hazards import RawFinding
from pytest_cudagraph.values import AuditRule

_PLAIN = (bool, int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""A graph keeps these by value. Generators, storages and functions compare by their class only."""

_PLAIN_EXACT = frozenset(_PLAIN)

NUMBER_TAKERS = ("aten.index_put_", "aten.masked_fill", "aten.fill_")
"""Operations that may take a Python number that torch has made into a tensor."""


CHECKED_ON_A_CPU = ("aten.one_hot", "aten.quantile", "aten.nanquantile")
"""Operations that read their input on a CPU to check its range, and not on CUDA."""


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

    @property
    def qualified_name(self) -> str:
        """``mylib::topk``. Empty for a higher-order operator."""
        return str(self.func._schema.name) if self.traits is not None else ""

    @property
    def parts(self) -> Callable[..., Any] | None:
        """Runs the operations of a composite one. None if it is a single one, or if a rule judges it as a whole."""
        return None if self.traits is None or self.is_judged else self.traits.composite

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
            makes_legal=name.startswith((*NUMBER_TAKERS, *CHECKED_ON_A_CPU)),
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


OwnRules = Mapping[str, AuditRule]
"""The rules of plugins, by the operator's name with its namespace."""

NO_RULES: OwnRules = MappingProxyType({})


class RuleChecker:
    """Judges each operation by its arguments, and by where its tensors lie. ``placement`` is None on a GPU."""

    def __init__(self, placement: Placement | None, own_rules: OwnRules = NO_RULES) -> None:
        self._placement = placement
        self._own_rules = own_rules
        self._draws = HostDraws()

    def judge(self, info: OperatorInfo, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RawFinding | None:
        """The finding of the rules in an operation. It has a line only if that is not the running line."""
        own = self._own_rules.get(info.qualified_name) if self._own_rules else None
        if own is not None:
            return RawFinding(id=own.hazard, text=own.reason, operation=info.short_name) if own.hazard else None
        placement = self._placement
        is_number = None if placement is None else placement.is_number
        found = hazards.judge(info.func, args, kwargs, is_number) if info.is_judged else None
        if placement is not None:
            return placement.judged(found, info.func, info.short_name, args, kwargs)
        given = _given(args, kwargs)
        # An operation on CPU tensors alone does not wait for the device. A copy to the device does.
        error = found if found is not None and found.level == "error" else None
        is_local = error is not None and (error.id in ("host-sync", "dynamic-shape") or info.is_lift)
        if is_local and _lies_on_host(tensors_read(info.short_name, given)):
            return self._draws.used(info.name, given)
        return found if found is not None or _lies_on_host(given) else self._draws.used(info.name, given)

    def place(
        self,
        info: OperatorInfo,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        made: Sequence[torch.Tensor],
        *,
        is_drawn: bool = False,
    ) -> None:
        """Note where an operation puts its results. ``is_drawn``: it draws random numbers."""
        if self._placement is not None:
            self._placement.place(info.short_name, _given(args, kwargs), made, is_drawn=is_drawn)
        elif _lies_on_host(made):
            self._draws.note(_given(args, kwargs), made, is_drawn=is_drawn)

    def is_on_host(self, made: Sequence[torch.Tensor]) -> bool:
        """Whether all these tensors lie on the host."""
        return _lies_on_host(made) if self._placement is None else self._placement.is_on_host(made)


class HostDraws:
    """Follows random numbers of the host where tensors know their place."""

    def __init__(self) -> None:
        self._drawn: dict[int | None, StorageWeakRef | None] = {}

    def note(self, given: Iterable[torch.Tensor], made: Iterable[torch.Tensor], *, is_drawn: bool) -> None:
        """Note the results of an operation on the host."""
        if is_drawn or any(storage_key(tensor) in self._drawn for tensor in given):
            self._drawn.update((storage_key(tensor), storage_of(tensor)) for tensor in made)

    def used(self, operation: str, given: Iterable[torch.Tensor]) -> RawFinding | None:
        """The finding in an operation that takes such a number to the device, or to Python."""
        is_used = any(storage_key(tensor) in self._drawn for tensor in given)
        return RawFinding(id="rng", text=HOST_DRAW_TEXT, operation=operation) if is_used else None


def _given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    return list(tensors_of((args, kwargs)))


def _lies_on_host(given: Sequence[torch.Tensor]) -> bool:
    return bool(given) and all(tensor.device.type == "cpu" for tensor in given)
