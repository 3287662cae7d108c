"""Reports as plain values and back, for the way from a pytest-xdist worker to the controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pytest_cudagraph.values import BatchReport, GraphReport, stored


def to_plain(report: GraphReport) -> dict[str, Any]:
    """Dicts, lists, str, int, float, bool and None of exactly these types: nothing else passes between workers."""
    plain = _plain(replace(report, batches=tuple(_with_stored_scenario(report.name, each) for each in report.batches)))
    assert isinstance(plain, dict)
    return plain


def _with_stored_scenario(test: str, batch: BatchReport) -> BatchReport:
    """The controller shows what a feature measured, and needs none of its classes."""
    return batch if batch.scenario is None else replace(batch, scenario=stored(batch.scenario, test))


def from_plain(plain: Mapping[str, Any]) -> GraphReport:
    """The report that :func:`to_plain` was given; raises :class:`ValueError` for values that are none."""
    try:
        report = _build(GraphReport, plain)
    except (KeyError, TypeError, AttributeError) as exc:
        raise ValueError(f"not a report in plain values: {exc!r}") from exc
    assert isinstance(report, GraphReport)
    return report


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return _exact(value)


def _exact(value: Any) -> Any:
    # pytest-xdist refuses subclasses, such as numpy's float64.
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if value is None:
        return None
    raise TypeError(f"a report cannot carry a {type(value).__name__}")


def _build(hint: Any, plain: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _build(_member(arguments, plain), plain)
    if origin is tuple:
        return tuple(_build(arguments[0], item) for item in plain)
    if origin is not None and origin is not Literal and issubclass(origin, Mapping):
        return {key: _build(arguments[1], item) for key, item in plain.items()}
    if isinstance(hint, type) and is_dataclass(hint):
        hints = get_type_hints(hint)
        return hint(**{name: _build(hints[name], item) for name, item in plain.items()})
    return hint(plain) if isinstance(hint, type) and issubclass(hint, Enum) else plain


def _member(kinds: tuple[Any, ...], plain: Any) -> Any:
    """The member of a union that fits: the dataclass with these fields, else the first that is not None."""
    if plain is None:
        return NoneType
    rest = [kind for kind in kinds if kind is not NoneType]
    if not isinstance(plain, Mapping):
        return rest[0]
    return next(kind for kind in rest if is_dataclass(kind) and {each.name for each in fields(kind)} == set(plain))
