"""The rules that depend on arguments: a mask, a missing size, a generator, a copy between devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from pytest_cudagraph.hazards.catalogue import (
    CAPTURE_UNSUPPORTED,
    FOREIGN_GENERATOR_TEXT,
    UNPINNED_COPY_TEXT,
    RawFinding,
)

FromHost: TypeAlias = Callable[[torch.Tensor], bool]
"""Tells whether a 0-dim tensor was made from a Python number. CUDA keeps such a number on the host."""

Rule: TypeAlias = Callable[[tuple[Any, ...], Mapping[str, Any], "FromHost | None"], "RawFinding | None"]
"""Takes the arguments of an operation. Its finding names no operation and no line."""

SYNC = RawFinding(id="host-sync", text=CAPTURE_UNSUPPORTED.text)
SHAPE = RawFinding(id="dynamic-shape", text=CAPTURE_UNSUPPORTED.text)
COPY = RawFinding(id="host-data", text=UNPINNED_COPY_TEXT)
_NUMBER = RawFinding(id="host-data", text="a Python number, captured by value", level="note")
_OTHER_GENERATOR = RawFinding(id="rng", text=FOREIGN_GENERATOR_TEXT)


def reader(func: Any, name: str) -> Callable[[tuple[Any, ...], Mapping[str, Any]], Any]:
    """Make a function that reads one argument by name: its value, else its default, else None."""
    arguments = func._schema.arguments
    place = next((index for index, argument in enumerate(arguments) if argument.name == name), None)
    default = arguments[place].default_value if place is not None else None

    def read(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if place is not None and place < len(args):
            return args[place]
        return kwargs.get(name, default)

    return read


def always(found: RawFinding) -> Rule:
    return lambda args, kwargs, from_host: found


def flag_rule(read: Callable[..., Any]) -> Rule:
    return lambda args, kwargs, from_host: SYNC if read(args, kwargs) else None


def generator_rule(read: Callable[..., Any]) -> Rule:
    def rule(args: tuple[Any, ...], kwargs: Mapping[str, Any], from_host: FromHost | None) -> RawFinding | None:
        generator = read(args, kwargs)
        return None if generator is None or _is_default(generator) else _OTHER_GENERATOR

    return rule


def _is_default(generator: torch.Generator) -> bool:
    # Each dispatch wraps the generator in a new Python object. Only the address inside stays the same.
    defaults = (torch.default_generator, *torch.cuda.default_generators)
    return any(_address(generator) == _address(default) for default in defaults)


def _address(generator: torch.Generator) -> int:
    return int(getattr(generator, "_cdata", id(generator)))


def _missing_size(func: Any) -> list[Rule]:
    if not any(overload in func.name() for overload in (".Tensor", ".self_Tensor")):
        return []
    read = reader(func, "output_size")
    return [lambda args, kwargs, from_host: SHAPE if read(args, kwargs) is None else None]


def _checked_on_a_cpu(func: Any) -> list[Rule]:
    # A CPU reads the fractions to check them. CUDA does not. A rule that finds nothing keeps the parts from judgement.
    return [lambda args, kwargs, from_host: None]


def _open_classes(func: Any) -> list[Rule]:
    # With num_classes the CPU reads the values to check them. one_hot on CUDA does not.
    read = reader(func, "num_classes")
    return [lambda args, kwargs, from_host: SHAPE if read(args, kwargs) == -1 else None]


def _condition_only(func: Any) -> list[Rule]:
    return [always(SHAPE)] if len(func._schema.arguments) == 1 else []


def _tensor_sections(func: Any) -> list[Rule]:
    return [always(SYNC)] if "tensor_indices" in func.name() else []


def _tensor_start(func: Any) -> list[Rule]:
    return [always(SYNC)] if func.name().endswith(".Tensor") else []


def _free_range(func: Any) -> list[Rule]:
    # With equal bounds (the default) histc takes them from the data.
    low, high = reader(func, "min"), reader(func, "max")
    return [lambda args, kwargs, from_host: SYNC if low(args, kwargs) == high(args, kwargs) else None]


def _masked_read(func: Any) -> list[Rule]:
    read = reader(func, "indices")

    def rule(args: tuple[Any, ...], kwargs: Mapping[str, Any], from_host: FromHost | None) -> RawFinding | None:
        indices = read(args, kwargs)
        return SHAPE if _masks(indices) else _sent_along(indices, args[0])

    return [rule]


def _masked_write(func: Any) -> list[Rule]:
    indices, values = reader(func, "indices"), reader(func, "values")
    accumulate = reader(func, "accumulate")

    def rule(args: tuple[Any, ...], kwargs: Mapping[str, Any], from_host: FromHost | None) -> RawFinding | None:
        given = [index for index in indices(args, kwargs) if index is not None]
        value = values(args, kwargs)
        is_number = _is_number(value, args[0], from_host)
        if not _masks(given):
            return COPY if is_number else _sent_along(given, args[0])
        # torch turns one mask and a number into masked_fill_, which needs no size.
        as_fill = len(given) == 1 and not accumulate(args, kwargs) and is_number is not False
        return None if as_fill else SHAPE

    return [rule]


def _number_wanted(func: Any) -> list[Rule]:
    if func._schema.arguments[-1].name != "value" or "Tensor" not in str(func._schema.arguments[-1].type):
        return []
    read = reader(func, "value")

    def rule(args: tuple[Any, ...], kwargs: Mapping[str, Any], from_host: FromHost | None) -> RawFinding | None:
        return SYNC if _is_number(read(args, kwargs), args[0], from_host) is False else None

    return [rule]


def _is_number(value: torch.Tensor, target: torch.Tensor, from_host: FromHost | None) -> bool | None:
    """Whether the value lies on the host when the target is on CUDA. None if a CPU cannot tell."""
    if value.dim() != 0:
        return False
    if value.device != target.device:
        return value.device.type == "cpu"
    if value.device.type != "cpu":
        return False
    return None if from_host is None else from_host(value)


def _sent_along(indices: Sequence[torch.Tensor | None], target: torch.Tensor) -> RawFinding | None:
    """The operation copies an index from the host to the device. The dispatcher does not show that copy."""
    crossings = (_crossing(index, target.device.type) for index in indices if index is not None)
    return next((crossing for crossing in crossings if crossing is not None), None)


def _masks(indices: Sequence[torch.Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _lifted(func: Any) -> list[Rule]:
    def rule(args: tuple[Any, ...], kwargs: Mapping[str, Any], from_host: FromHost | None) -> RawFinding | None:
        if args[0].numel() == 0:  # nothing to copy
            return None
        # On CUDA any operation takes a 0-dim CPU tensor as a number, and the graph keeps its value.
        on_host = args[0].dim() == 0 and args[0].device.type == "cpu"
        return _NUMBER if on_host else COPY

    return [rule]


def _between_devices(func: Any) -> list[Rule]:
    target = reader(func, "device")

    def rule(args: tuple[Any, ...], kwargs: Mapping[str, Any], from_host: FromHost | None) -> RawFinding | None:
        to = target(args, kwargs)
        return None if to is None else _crossing(args[0], torch.device(to).type)

    return [rule]


def _written_from(func: Any) -> list[Rule]:
    return [lambda args, kwargs, from_host: _crossing(args[1], args[0].device.type)]


def _crossing(source: Any, target_type: str) -> RawFinding | None:
    source_type = source.device.type
    if source_type == target_type:
        return None
    if target_type == "cpu":
        return SYNC
    return COPY if source_type == "cpu" and not source.is_pinned() else None


SPECIAL: Mapping[str, Callable[[Any], list[Rule]]] = {
    "where": _condition_only,
    "one_hot": _open_classes,
    "quantile": _checked_on_a_cpu,
    "nanquantile": _checked_on_a_cpu,
    "repeat_interleave": _missing_size,
    "tensor_split": _tensor_sections,
    "narrow": _tensor_start,
    "histc": _free_range,
    "index": _masked_read,
    "_unsafe_index": _masked_read,
    "index_put": _masked_write,
    "_index_put_impl": _masked_write,
    "_unsafe_index_put": _masked_write,
    "index_fill": _number_wanted,
    "masked_fill": _number_wanted,
    "lift_fresh": _lifted,
    "_to_copy": _between_devices,
    "to": _between_devices,
    "copy": _written_from,
}
