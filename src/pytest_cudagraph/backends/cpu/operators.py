"""The properties of an operator, and the fastest Python binding that calls it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pytest_cudagraph.backends.capture_mode import ObservingMode, tensors_of
from pytest_cudagraph.hazards import collectives

_COMPOSITE_KEY = torch._C.DispatchKey.CompositeImplicitAutograd

# They allocate memory without values, so a replay has nothing to compute.
_ALLOCATIONS = frozenset("empty empty_like empty_strided empty_permuted new_empty new_empty_strided".split())

# They change how a tensor views its memory. A second run would change it again.
_METADATA_ONLY = frozenset("set_ resize_ resize_as_ detach_ requires_grad_ rename_".split())

# Normalisation updates its running statistics, which its schema does not declare.
_UNDECLARED_WRITES = frozenset({"running_mean", "running_var"})
_WRITE_SWITCHES = frozenset({"training", "train", "use_input_stats"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """The properties of one operator."""

    name: str
    composite: Callable[..., Any] | None
    """Runs the operators that this one consists of. None if it is a single one."""
    random: bool
    allocates: bool
    metadata_only: bool
    makes_constant: bool
    collective: bool
    hands_on: bool
    """Whether it returns its argument, perhaps in a wrapper."""
    _writes: tuple[tuple[int, str], ...]
    _undeclared: tuple[tuple[int, str], ...]
    _switch: tuple[int, str] | None

    def written(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors that a call with these arguments writes to."""
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
        makes_constant=base == "lift_fresh",
        collective=collectives.is_collective(func),
        hands_on=collectives.hands_on(func),
        _writes=tuple(
            place
            for place, argument in zip(places, func._schema.arguments, strict=True)
            if (argument.alias_info is not None and argument.alias_info.is_write)
            or (place[0] == 0 and collectives.writes_first_argument(func))
        ),
        _undeclared=tuple(place for place in places if place[1] in _UNDECLARED_WRITES),
        _switch=next((place for place in places if place[1] in _WRITE_SWITCHES), None),
    )


def baked(value: Any, alias: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same arguments with ``alias(tensor)`` for each tensor, and with copies of lists."""
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
    # func.decompose() may use Python decompositions, whose last bits differ.
    return functools.partial(func._op_dk, _COMPOSITE_KEY)


Call = Callable[..., Any]

_MODULES = tuple(
    module
    for module in (
        torch._C._VariableFunctions,
        torch._C._nn,
        *(getattr(torch._C, name, None) for name in ("_linalg", "_special", "_fft")),
    )
    if module is not None
)


def bind(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Call:
    """A callable without arguments that runs ``func``. ``result`` is its earlier result."""
    if collectives.is_collective(func):
        return functools.partial(collectives.run_to_end, func, *args, **kwargs)
    found = find_binding(func, args, kwargs, result, kwargs)
    return found or functools.partial(func._op, *args, **kwargs)


def find_binding(
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    result: Any,
    spelled: Mapping[str, Any],
) -> Call | None:
    """The binding that dispatches ``func(*args, **kwargs)`` when called as ``binding(*args, **spelled)``."""
    for binding in _candidates(func, args):
        probe = _Probe(result)
        try:
            with probe:
                binding(*args, **spelled)
        except (TypeError, RuntimeError, ValueError):  # the binding has another signature
            continue
        if probe.saw(func, args, kwargs):
            return functools.partial(binding, *args, **spelled)
    return None


def _candidates(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> Iterator[Call]:
    name = func._schema.name.partition("::")[2]
    # The base class, because methods of torch.Tensor may be Python, or replaced during the recording.
    if args and isinstance(args[0], torch.Tensor) and hasattr(torch._C.TensorBase, name):
        yield getattr(torch._C.TensorBase, name)
    for module in _MODULES:
        if hasattr(module, name):
            yield getattr(module, name)


class _Probe(ObservingMode):
    """Notes the dispatched operation, and returns a known result instead of running it."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result
        self._seen: list[tuple[Any, tuple[Any, ...], Mapping[str, Any]]] = []

    def observe(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._seen.append((func, args, kwargs))
        return self._result

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        return len(self._seen) == 1 and self._seen[0][0] is func and _same(self._seen[0][1:], (args, dict(kwargs)))


def _same(seen: Any, wanted: Any) -> bool:
    if isinstance(seen, torch.Tensor) or isinstance(wanted, torch.Tensor):
        return seen is wanted
    if isinstance(seen, (list, tuple)):
        return (
            isinstance(wanted, (list, tuple))
            and len(seen) == len(wanted)
            and all(_same(a, b) for a, b in zip(seen, wanted, strict=True))
        )
    if isinstance(seen, dict):
        return (
            isinstance(wanted, dict) and seen.keys() == wanted.keys() and all(_same(seen[k], wanted[k]) for k in seen)
        )
    return type(seen) is type(wanted) and bool(seen == wanted)
