"""Parsers of single values.

Each raises ``ValueError`` with a text of what is allowed; the caller adds the place and the value found.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeGuard


def one_of(*allowed: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}")
        return str(value)

    return parse


DEVICES = ("auto", "cuda", "cpu")


def number(
    *, above: float | None = None, at_least: float | None = None, at_most: float = math.inf
) -> Callable[[Any], float]:
    allowed = f"a number above {above:g}" if above is not None else f"a number of at least {at_least:g}"
    allowed += f", at most {at_most:g}" if math.isfinite(at_most) else ""

    def parse(value: Any) -> float:
        parsed = _float(value)
        low_enough = parsed > above if above is not None else at_least is not None and parsed >= at_least
        if not (math.isfinite(parsed) and low_enough and parsed <= at_most):
            raise ValueError(allowed)
        return parsed

    return parse


seconds = number(above=0, at_most=86_400)
"""At most a day, so that clocks and locks can count the nanoseconds."""


def fraction(*, may_be_off: bool = False) -> Callable[[Any], float]:
    """From 0 to 1; with ``may_be_off`` also infinity, which switches a gate off."""
    off = ", or inf for no limit" if may_be_off else ""

    def parse(value: Any) -> float:
        ratio = _float(value)
        if 0 <= ratio <= 1 or (may_be_off and ratio == math.inf):
            return ratio
        # A user who writes 10 means 10 %, not 1000 %.
        percent = ratio if 1 < ratio <= 100 else 10.0
        raise ValueError(f"a fraction from 0 to 1 ({percent:g} % is {percent / 100:g}){off}")

    return parse


def _float(value: Any) -> float:
    """The value as a number; NaN where it is not a number."""
    try:
        return math.nan if isinstance(value, bool) else float(value)
    # Its own __float__ may raise anything.
    except Exception:
        return math.nan


def name(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a non-empty string")
    return value


def path_name(value: Any) -> str:
    """``~`` is the home folder: a shell leaves it as it is in ``--option=~/folder``."""
    return os.path.expanduser(name(value))


def reasons(value: Any) -> dict[str, str]:
    """Why each hazard is accepted, by its id."""
    if not isinstance(value, Mapping) or not value:
        raise ValueError('a reason per hazard, such as {"baked-scalar": "times zero"}')
    for hazard, reason in value.items():
        if not all(isinstance(text, str) and text.strip() for text in (hazard, reason)):
            raise ValueError('a reason per hazard, such as {"baked-scalar": "times zero"}')
    return dict(value)


def is_whole(value: Any, least: int) -> TypeGuard[int]:
    """Whether a value is a whole number and large enough. True and False are no numbers."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def whole_number(value: Any, least: int = 0) -> int:
    if not is_whole(value, least):
        raise ValueError(f"a whole number of at least {least}")
    return value


def thread_count(value: Any) -> int:
    is_text = isinstance(value, str) and value.strip().isdecimal()
    return whole_number(int(value) if is_text else value, least=1)


def distinct_sizes(value: Any) -> tuple[int, ...]:
    allowed = "distinct whole numbers of at least 1, such as 1,2,4,8"
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, Sequence) or not parts:
        raise ValueError(allowed)
    try:
        sizes = tuple(int(part) if isinstance(part, str) else part for part in parts)
    except ValueError:
        raise ValueError(allowed) from None
    if not all(is_whole(size, 1) for size in sizes) or len(set(sizes)) != len(sizes):
        raise ValueError(allowed)
    return sizes


def lengths(*, least: int) -> Callable[[Any], tuple[int, ...]]:
    """Numbers of tokens. The caller's ``least`` is the smallest that makes sense."""

    def parse(value: Any) -> tuple[int, ...]:
        with suppress(ValueError):
            sizes = distinct_sizes(value if not isinstance(value, str) else ())
            if min(sizes) >= least:
                return sizes
        raise ValueError(f"distinct whole numbers of tokens of at least {least}, such as [32, 512]")

    return parse


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("True or False")
    return value


def switch(value: Any) -> bool:
    """Of the command line or a configuration file, with the words that pytest takes for its own options."""
    text = value.strip().lower() if isinstance(value, str) else value
    if text is True or text in ("true", "yes", "y", "t", "on", "1"):
        return True
    if text is False or text in ("false", "no", "n", "f", "off", "0"):
        return False
    raise ValueError("true or false")


def min_speedups(value: Any) -> float | dict[int, float]:
    factor = number(above=0)
    if not isinstance(value, Mapping):
        return factor(value)
    try:
        # Keys are numbers, unlike the parts of a text "1,2": the mapping is read by them.
        sizes = distinct_sizes(list(value) if all(isinstance(size, int) for size in value) else ())
        return {size: factor(value[size]) for size in sizes}
    except ValueError:
        raise ValueError("a number above 0, or {batch size: number above 0}") from None


def check_covered(minimums: Mapping[int, float], sizes: Sequence[int]) -> None:
    """Raise ``ValueError``, with the whole message, for a minimum of a batch size that is not measured."""
    left_out = sorted(set(minimums) - set(sizes))
    if left_out:
        raise ValueError(f"min names batch size {left_out[0]}, which batch_sizes {tuple(sizes)} leaves out")
