"""Single values of a record, read from and made for a file: each is what it has to be, or a ValueError says what."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any, TypeGuard

from pytest_cudagraph.units import to_ns, to_seconds
from pytest_cudagraph.values import DeviceInfo

_DIGITS = 4
"""0.01 % at worst: a hundredth of what two runs of the same code differ by."""

_LEAST, _MOST = 1e-30, 1e15
"""Of seconds and ratios: far beyond any that was measured, and quotients of them still have a logarithm."""

_MOST_LOG = 100.0
"""Of what is a logarithm itself: beyond that of the quotient of the two above, and it still has an exponential."""

_MOST_COUNTED = 10**12


def number(numbers: Mapping[str, Any], key: str) -> float:
    """A positive number. Raises :class:`KeyError` or :class:`ValueError`, as all of these do."""
    return positive(numbers[key], key)


def positive(value: Any, what: str, *, most: float = _MOST) -> float:
    """The value, if it is a number above 0 that arithmetic is possible with; it is compared before it is converted."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _LEAST <= value <= most:
        raise _error(what, _allowed(value, most), value)
    return float(value)


def _allowed(value: Any, most: float) -> str:
    is_finite = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
    return "a positive number" + f" from {_LEAST:g} to {most:g}" * is_finite


def logarithm(numbers: Mapping[str, Any], key: str) -> float:
    """A positive logarithm, to four digits."""
    return significant(positive(numbers[key], key, most=_MOST_LOG))


def whole(numbers: Mapping[str, Any], key: str, *, least: int = 0) -> int:
    """A whole number, as counts are."""
    value = numbers[key]
    if not is_whole(value, least=least):
        raise _error(key, "a whole number", value)
    return value


def is_whole(value: Any, *, least: int = 0) -> TypeGuard[int]:
    """Whether this counts something."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _MOST_COUNTED


def text(texts: Mapping[str, Any], key: str) -> str:
    """A text that can be shown and written."""
    value = texts[key]
    if not is_text(value):
        raise _error(key, "a text", value)
    return value


def is_text(value: Any) -> TypeGuard[str]:
    """JSON can spell halves of characters, which no file and no terminal takes."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def mapping(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A JSON object."""
    value = values[key]
    if not isinstance(value, dict):
        raise _error(key, "a mapping", value)
    return value


def counts(found: Mapping[str, Any]) -> dict[str, int]:
    """How many there are of each of what is named."""
    strange = next((name for name in found if not is_text(name)), None)
    if strange is not None:
        raise _error("a name", "a text", strange)
    return {name: whole(found, name) for name in found}


def device(found: Mapping[str, Any]) -> DeviceInfo:
    """What a record tells of its device; older files tell less."""
    kind = text(found, "kind")
    if kind not in ("cuda", "cpu"):
        raise _error("kind", "cuda or cpu", kind)
    return DeviceInfo(
        kind="cuda" if kind == "cuda" else "cpu",
        name=text(found, "name"),
        driver=_text_if_told(found, "driver"),
        cuda=_text_if_told(found, "cuda"),
        torch=text(found, "torch"),
        python=text(found, "python"),
        host_cpu=text(found, "host_cpu"),
        platform=text(found, "platform"),
        threads=whole(found, "threads"),
        mig=_text_if_told(found, "mig"),
        power_limit_w=None if found.get("power_limit_w") is None else whole(found, "power_limit_w"),
        clocks=_text_if_told(found, "clocks"),
    )


def _text_if_told(found: Mapping[str, Any], key: str) -> str | None:
    return None if found.get(key) is None else text(found, key)


def nanoseconds(numbers: Mapping[str, Any], key: str) -> float:
    """A latency that a file tells in seconds."""
    return significant(to_ns(number(numbers, key)))


def seconds(nanoseconds: float) -> float:
    """A latency as a file tells it."""
    return significant(to_seconds(positive(nanoseconds, "a latency")))


def significant(value: float) -> float:
    """The value to four digits."""
    return float(f"{value:.{_DIGITS}g}")


def _error(what: str, allowed: str, value: Any) -> ValueError:
    return ValueError(f"{what} must be {allowed}, not {reprlib.repr(value)}")
