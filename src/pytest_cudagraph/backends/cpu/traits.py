"""What a recording must know of one operator, read once from its schema."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_COMPOSITE_KEY = torch._C.DispatchKey.CompositeImplicitAutograd

# Memory without values: a replay has nothing to compute.
_ALLOCATIONS = frozenset("empty empty_like empty_strided empty_permuted new_empty new_empty_strided".split())

# These change a tensor's view of its memory, not the memory; a second run would change it once more.
_METADATA_ONLY = frozenset("set_ resize_ resize_as_ detach_ requires_grad_ rename_".split())

# Normalisation updates its running statistics without saying so in its schema.
_UNDECLARED_WRITES = frozenset({"running_mean", "running_var"})
_WRITE_SWITCHES = frozenset({"training", "train", "use_input_stats"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """One operator: is it made of others, random, a mere allocation; which of its arguments does it write."""

    name: str
    composite: Callable[..., Any] | None
    """Runs the operator by its parts, each of which is dispatched; None where it has no parts."""
    random: bool
    allocates: bool
    metadata_only: bool
    lifts: bool
    _writes: tuple[tuple[int, str], ...]
    _undeclared: tuple[tuple[int, str], ...]
    _switch: tuple[int, str] | None

    def written(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors that this call writes to."""
        places = self._writes
        if self._switch is not None and _argument(self._switch, args, kwargs):
            places += self._undeclared
        return [tensor for place in places for tensor in tensors_of(_argument(place, args, kwargs))]


@functools.cache
def traits_of(func: torch._ops.OpOverload) -> Traits:
    places = [(index, argument.name) for index, argument in enumerate(func._schema.arguments)]
    base = func._schema.name.partition("::")[2]
    tags = {tag.name for tag in func.tags}
    return Traits(
        name=str(func.overloadpacket),
        composite=_composite(func),
        random="nondeterministic_seeded" in tags,
        allocates=base in _ALLOCATIONS,
        metadata_only=base in _METADATA_ONLY or "inplace_view" in tags,
        lifts=base == "lift_fresh",
        _writes=tuple(
            place
            for place, argument in zip(places, func._schema.arguments, strict=True)
            if argument.alias_info is not None and argument.alias_info.is_write
        ),
        _undeclared=tuple(place for place in places if place[1] in _UNDECLARED_WRITES),
        _switch=next((place for place in places if place[1] in _WRITE_SWITCHES), None),
    )


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in an operator's arguments or results: alone, or in lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))


def baked(value: Any, alias: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same arguments by address: each tensor as ``alias`` gives it, lists copied."""
    if isinstance(value, torch.Tensor):
        return alias(value)
    if type(value) in (list, tuple):
        return type(value)([baked(item, alias) for item in value])
    if isinstance(value, dict):
        return {key: baked(item, alias) for key, item in value.items()}
    return value


def _argument(place: tuple[int, str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    index, name = place
    return args[index] if index < len(args) else kwargs.get(name)


def _composite(func: torch._ops.OpOverload) -> Callable[..., Any] | None:
    schema = func._schema
    name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if not has_kernel(name, "CompositeImplicitAutograd") or has_kernel(name, "CPU"):
        return None
    # Not func.decompose(): torch registers Python decompositions there whose last bits differ.
    return functools.partial(func._op_dk, _COMPOSITE_KEY)
