"""What one dispatched operation is called with, and what is known of its operator whatever the arguments."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from pytest_cudagraph import hazards

_PLAIN = (bool, int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""What a graph keeps by value. Of a generator, a storage or a function only the kind can be told."""

_PLAIN_EXACT = frozenset(_PLAIN)

LEGAL_BESIDE = ("aten.index_put_", "aten.masked_fill", "aten.fill_", "aten.one_hot")
"""Operations that make legal what happens beside them: a number they take, the range of classes that the CPU checks."""


class Facts(NamedTuple):
    """What is known of an operator whatever its arguments; holds it, so that its identity is not used again."""

    func: Any
    name: str
    short_name: str
    is_judged: bool
    may_draw: bool
    is_lift: bool
    is_legal_beside: bool


class Operators(dict[int, Facts]):
    """The facts of each operator by its identity: hashing an operator costs more than all that is asked of it."""

    def learn(self, func: Any) -> Facts:
        name, short_name = str(func), str(getattr(func, "overloadpacket", func).__name__)
        self[id(func)] = facts = Facts(
            func=func,
            name=name,
            short_name=short_name,
            is_judged=hazards.is_judged(func),
            may_draw=any(tag.name == "nondeterministic_seeded" for tag in getattr(func, "tags", ())),
            is_lift=short_name == "lift_fresh",
            is_legal_beside=name.startswith(LEGAL_BESIDE),
        )
        return facts


def sort_out(values: Iterable[Any], scalars: list[Any], tensors: list[torch.Tensor]) -> None:
    """Arguments in order: tensors apart, and all in a form that compares, where a tensor is no more than its kind."""
    for value in values:
        kind = type(value)
        if kind in _PLAIN_EXACT:
            scalars.append(value)
        elif isinstance(value, torch.Tensor):
            tensors.append(value)
            scalars.append(kind.__name__)
        elif isinstance(value, list | tuple):
            sort_out(value, scalars, tensors)
        else:
            scalars.append(scalar(value))


def scalar(value: Any) -> Any:
    """A plain argument in a form that compares: NaN equals NaN; what is not plain equals its like."""
    if isinstance(value, float | complex):
        return repr(value)
    return value if isinstance(value, _PLAIN) else type(value).__name__


def tensors_of(result: Any) -> list[torch.Tensor]:
    """The tensors among the results of an operation, in order."""
    return [result] if isinstance(result, torch.Tensor) else list(_tensors((result,)))


def written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that an operation writes to."""
    names, flag = _write_names(func)
    if not names and flag is None:
        return iter(())
    given = {**dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)), **kwargs}
    # Normalisation in training updates its statistics, which the schemas of most of its forms do not say.
    statistics = ("running_mean", "running_var") if flag is not None and given.get(flag) is True else ()
    return _tensors(given.get(name) for name in (*names, *statistics))


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


@functools.cache
def _write_names(func: Any) -> tuple[tuple[str, ...], str | None]:
    """The arguments that the schema marks as written, and the flag that makes a normalisation write too."""
    arguments = getattr(getattr(func, "_schema", None), "arguments", ())
    written = (argument for argument in arguments if argument.alias_info is not None and argument.alias_info.is_write)
    named = {argument.name for argument in arguments}
    flags = [flag for flag in ("training", "train", "use_input_stats") if flag in named and "running_mean" in named]
    return tuple(argument.name for argument in written), flags[0] if flags else None
