"""Single values of a record: each is what it has to be, or a ValueError says what."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pytest_cudagraph.values import DeviceInfo

_NUMBERS = (float, int)
_LEAST, _MOST = 1e-30, 1e15
"""Of seconds and ratios: beyond any that was measured, and quotients of them still have a logarithm."""
_MOST_LOG = 30.0
"""Of the logarithm of a ratio: a factor of 10**13. The exponential of a larger one may be no number."""


def number(found: Mapping[str, Any], key: str) -> float:
    """A positive number. Raises :class:`KeyError` or :class:`ValueError`, as all of these do."""
    value = found[key]
    if type(value) not in _NUMBERS or not _LEAST < value < _MOST:
        raise _error(key, "a positive number", value)
    return float(value)


def log_ratio(found: Mapping[str, Any], key: str) -> float:
    """The logarithm of a ratio above 1 that a machine can have."""
    value = number(found, key)
    if value > _MOST_LOG:
        raise _error(key, f"at most {_MOST_LOG:g}", value)
    return value


def nanoseconds(found: Mapping[str, Any], key: str) -> float:
    """A latency that a file holds in seconds, without the ``...0000001`` of the product."""
    value = found[key]
    if type(value) not in _NUMBERS or not _LEAST < value < _MOST:
        raise _error(key, "a positive number", value)
    product = value * 1e9
    # Four digits: from 10 µs on a whole number, which is quickly rounded.
    return float(round(product)) if product > 1e4 else round(product, 6)


def seconds_text(nanoseconds: float) -> str:
    """A latency as a file holds it."""
    return positive_text(nanoseconds / 1e9, "a latency")


def positive_text(value: float, what: str) -> str:
    """A positive number as a file holds it."""
    if not _LEAST < value < _MOST:
        raise _error(what, "a positive number", value)
    return digits(value)


def digits(value: float) -> str:
    """Four significant digits: 0.05 % at worst, far below what two runs of the same code differ by."""
    text = f"{value:.4g}"
    # As JSON spells it: not 1312 or 1.3e+04.
    return text if "." in text and "+" not in text else repr(float(text))


def whole(found: Mapping[str, Any], key: str, *, least: int = 0) -> int:
    """A whole number, as counts are."""
    value = found[key]
    if type(value) is not int or value < least:
        raise _error(key, "a whole number", value)
    return value


def text(found: Mapping[str, Any], key: str) -> str:
    """A text."""
    value = found[key]
    if type(value) is not str:
        raise _error(key, "a text", value)
    return value


def mapping(found: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A JSON object."""
    value = found[key]
    if type(value) is not dict:
        raise _error(key, "a mapping", value)
    return value


def device(found: Mapping[str, Any]) -> DeviceInfo:
    """The device of a record; older files hold less."""
    return _device(tuple(found.items()))


@lru_cache(maxsize=8)
def _device(items: tuple[tuple[str, Any], ...]) -> DeviceInfo:
    found = dict(items)
    optional = {key: text(found, key) for key in ("driver", "cuda", "mig", "clocks") if found.get(key) is not None}
    return DeviceInfo(
        kind=text(found, "kind"),
        name=text(found, "name"),
        driver=optional.get("driver"),
        cuda=optional.get("cuda"),
        torch=text(found, "torch"),
        python=text(found, "python"),
        host_cpu=text(found, "host_cpu"),
        platform=text(found, "platform"),
        threads=whole(found, "threads"),
        mig=optional.get("mig"),
        power_limit_w=None if found.get("power_limit_w") is None else whole(found, "power_limit_w"),
        clocks=optional.get("clocks"),
    )


def _error(what: str, allowed: str, value: Any) -> ValueError:
    return ValueError(f"{what} must be {allowed}, not {reprlib.repr(value)}")
