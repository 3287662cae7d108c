"""Values as plain data and back, field by field: one codec for xdist's workers and for documents.

A worker sends every number as it is. A document is for everybody: its times are seconds, what is not finite is null,
and what is no plain value is text.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, overload

from pytest_cudagraph.units import NS_PER_S
from pytest_cudagraph.values import (
    BaseComparison,
    GraphReport,
    Latency,
    Medians,
    SavedFigure,
    Scenario,
    Session,
    StoredScenario,
    stored,
)

_T = TypeVar("_T")
_Read = Callable[[Any], Any]

_POSITIVE = frozenset((Latency, Medians, Session, SavedFigure))
"""Their times are latencies, which have a logarithm."""

_BARE = _POSITIVE | {BaseComparison}
"""Their times have no unit in a document: ``median``. Others have: ``capture_seconds``."""

_NULL = {"low": 0.0, "high": math.inf, "noise_ratio": math.inf, "detectable_ratio": math.inf, "drift_ratio": math.inf}
"""What null stands for, by field: a bound that was not found, a spread without enough blocks."""

_LEAST_S, _MOST = 1e-30, 1e15
"""Beyond any time in seconds and any ratio or count, and quotients of them still have a logarithm."""


def to_plain(value: Any, *, public: bool = False) -> Any:
    """Dicts, lists, str, int, float, bool and None of exactly these types: nothing else passes between workers.

    ``public``: as documents have it. Raises :class:`TypeError` for what is no plain value, unless ``public``.
    """
    if is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        return {_key(kind, each.name, public): _field(each.name, getattr(value, each.name), public)
                for each in fields(value)}  # fmt: skip
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_plain(item, public=public) for key, item in value.items()}
    if isinstance(value, (tuple, list, set, frozenset)):
        return [to_plain(item, public=public) for item in value]
    return _exact(value, public)


def report_to_plain(report: GraphReport) -> dict[str, Any]:
    """A report for the way from a worker to the controller. Its scenarios travel as what is shown and written."""
    batches = tuple(
        replace(batch, scenario=stored(batch.scenario, report.name)) if batch.scenario else batch
        for batch in report.batches
    )
    plain: dict[str, Any] = to_plain(replace(report, batches=batches))
    return plain


def _key(kind: type, name: str, public: bool) -> str:
    if not (public and name.endswith("_ns")):
        return name
    return name.removesuffix("_ns") + ("" if kind in _BARE else "_seconds")


def _field(name: str, value: Any, public: bool) -> Any:
    if not (public and name.endswith("_ns")):
        return to_plain(value, public=public)
    return [seconds(each) for each in value] if isinstance(value, tuple) else seconds(value)


def seconds(nanoseconds: float | None) -> float | None:
    """Seconds of a document: rounded to picoseconds, which is below any clock."""
    if nanoseconds is None or not math.isfinite(nanoseconds):
        return None
    return round(nanoseconds / NS_PER_S, 12)


def _exact(value: Any, public: bool) -> Any:
    # pytest-xdist refuses subclasses, such as numpy's float64.
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return None if public and kind is float and not math.isfinite(float(value)) else kind(value)
    if value is None or public:
        return None if value is None else str(value)
    raise TypeError(f"a report cannot carry a {type(value).__name__}")


@overload
def from_plain(hint: type[_T], plain: Any, *, public: bool = False) -> _T: ...
@overload
def from_plain(hint: object, plain: Any, *, public: bool = False) -> Any: ...
def from_plain(hint: Any, plain: Any, *, public: bool = False) -> Any:
    """What :func:`to_plain` was given, of the type ``hint``.

    Raises :class:`ValueError` that names the field and what it needs.
    """
    return _reader(hint, public)(plain)


@cache
def _reader(hint: Any, public: bool) -> _Read:
    """A function that checks one plain value and builds what the type ``hint`` says."""
    hint = StoredScenario if hint is Scenario else hint
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _union_reader(
            tuple(dict.fromkeys(StoredScenario if each is Scenario else each for each in arguments)), public
        )
    if origin is Literal:
        return lambda plain: (
            plain if plain in arguments and type(plain) is str else _refuse(f"one of {arguments}", plain)
        )
    if origin is tuple:
        return _tuple_reader(_reader(arguments[0], public))
    if origin is not None and issubclass(origin, Mapping):
        return _mapping_reader(_reader(arguments[1], public))
    if isinstance(hint, type) and is_dataclass(hint):
        return _class_reader(hint, public)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return lambda plain: hint(plain) if plain in {each.value for each in hint} else _refuse("a known word", plain)
    return (_PLAIN if public else _PLAIN | _OF_WORKERS).get(hint, lambda plain: plain)


def _refuse(needed: str, plain: Any) -> Any:
    raise ValueError(f"{needed} is needed, not {reprlib.repr(plain)}")


def _whole(plain: Any) -> Any:
    return plain if type(plain) is int and abs(plain) < _MOST * 1e3 else _refuse("a whole number", plain)


def _number(plain: Any) -> Any:
    return plain if type(plain) in (int, float) and not abs(plain) > 1e300 else _refuse("a number", plain)


_PLAIN: dict[Any, _Read] = {
    str: lambda plain: plain if type(plain) is str else _refuse("a text", plain),
    bool: lambda plain: plain if type(plain) is bool else _refuse("true or false", plain),
    int: _whole,
    float: _number,
}

_OF_WORKERS: dict[Any, _Read] = {
    int: lambda plain: plain if type(plain) is int else _refuse("a whole number", plain),
    float: lambda plain: plain if type(plain) in (int, float) else _refuse("a number", plain),
}
"""A worker may send any number: a bound that was not found is infinite."""


def _union_reader(kinds: tuple[Any, ...], public: bool) -> _Read:
    """The member of a union that fits: of several classes the first that has the keys."""
    rest = [kind for kind in kinds if kind is not NoneType]
    readers = [(_needed(kind, public), _reader(kind, public)) for kind in rest]

    def read(plain: Any) -> Any:
        if plain is None and len(rest) < len(kinds):
            return None
        if len(readers) == 1 or type(plain) is not dict:
            return readers[0][1](plain)
        fitting = (reader for needed, reader in readers if needed <= plain.keys())
        return next(fitting, readers[0][1])(plain)

    return read


def _needed(kind: Any, public: bool) -> frozenset[str]:
    named = fields(kind) if isinstance(kind, type) and is_dataclass(kind) else ()
    return frozenset(_key(kind, each.name, public) for each in named if not _has_default(each))


def _has_default(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


def _tuple_reader(item: _Read) -> _Read:
    def read(plain: Any) -> Any:
        if type(plain) is not list:
            _refuse("a list", plain)
        return tuple(located(number, item, each) for number, each in enumerate(plain))

    return read


def _mapping_reader(item: _Read) -> _Read:
    def read(plain: Any) -> Any:
        if type(plain) is not dict:
            _refuse("a mapping", plain)
        return {key: located(key, item, each) for key, each in plain.items()}

    return read


def located(place: Any, read: _Read, plain: Any) -> Any:
    """``read(plain)``. A :class:`ValueError` names the place in the document."""
    try:
        return read(plain)
    except KeyError as error:
        raise ValueError(f"{place}: {error.args[0]} is missing") from None
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def items(plain: Any, read: Callable[[Any], _T]) -> tuple[_T, ...]:
    """The items of a list, each as ``read`` makes it."""
    result: tuple[_T, ...] = _tuple_reader(read)(plain)
    return result


def _class_reader(kind: Any, public: bool) -> _Read:
    hints = get_type_hints(kind)
    parts = [
        (each.name, _key(kind, each.name, public), _field_reader(kind, each.name, hints[each.name], public),
         _has_default(each))
        for each in fields(kind)
    ]  # fmt: skip

    def read(plain: Any) -> Any:
        if type(plain) is not dict:
            _refuse("a mapping", plain)
        values = {}
        for name, key, reader, has_default in parts:
            if key in plain:
                values[name] = located(key, reader, plain[key])
            elif not has_default:
                raise ValueError(f"{key} is missing")
        return kind(**values)

    return read


def _field_reader(kind: type, name: str, hint: Any, public: bool) -> _Read:
    if public and name.endswith("_ns"):
        least_s = _LEAST_S if kind in _POSITIVE else 0.0
        is_whole = int in (hint, *get_args(hint))
        one = _nanoseconds_reader(least_s, is_whole=is_whole)
        if get_origin(hint) is tuple:
            return _tuple_reader(one)
        return (lambda plain: None if plain is None else one(plain)) if NoneType in get_args(hint) else one
    read = _reader(hint, public)
    if public and name in _NULL and hint is float:
        return lambda plain: _NULL[name] if plain is None else read(plain)
    return read


def _nanoseconds_reader(least_s: float, *, is_whole: bool) -> _Read:
    """A time of a document. A text times 1e9 would take all memory, so the type comes first."""

    def read(plain: Any) -> Any:
        if type(plain) not in (int, float) or not least_s <= plain < _MOST:
            _refuse("a number of seconds", plain)
        nanoseconds = round(plain * 1e9, 3)
        return round(nanoseconds) if is_whole else nanoseconds

    return read
