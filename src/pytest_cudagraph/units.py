"""Nanoseconds, bytes and ratios as text. Only this module converts units for a reader."""

from __future__ import annotations

import math
from collections.abc import Sequence

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000

_TIME_STEPS = ((1e3, "ns", 1.0), (1e6, "µs", 1e3), (1e9, "ms", 1e6))
_BYTE_STEPS = ("B", "KiB", "MiB", "GiB")


def latency_text(nanoseconds: float) -> str:
    """``112.1 µs``: one decimal, the unit chosen so that the number stays below 1000."""
    for limit, unit, divisor in _TIME_STEPS:
        # Rounding comes before choosing the unit, so that 999.96 µs reads 1.0 ms and never 1000.0 µs.
        if round(nanoseconds / divisor, 1) * divisor < limit:
            return f"{nanoseconds / divisor:.1f} {unit}"
    return f"{nanoseconds / NS_PER_S:.1f} s"


def seconds_text(nanoseconds: float) -> str:
    """``0.9 s``: for the time a measurement or a compile took."""
    seconds = nanoseconds / NS_PER_S
    return f"{seconds:.1f} s" if seconds >= 0.1 else f"{seconds * 1e3:.0f} ms"


def bytes_text(count: float) -> str:
    """``41.0 MiB``; whole bytes below 1 KiB."""
    for step, unit in enumerate(_BYTE_STEPS):
        scaled = count / 1024**step
        if round(scaled, 1) < 1024 or unit == _BYTE_STEPS[-1]:
            break
    return f"{scaled:.0f} {unit}" if unit == "B" else f"{scaled:.1f} {unit}"


def factor_text(ratio: float) -> str:
    """``1.07x``."""
    return f"{ratio:.2f}x"


def percent_text(fraction: float) -> str:
    """``0.4 %`` for 0.004; no decimals from 10 % on. What is less than all never reads 100 %."""
    percent = fraction * 100
    if 99.0 < percent < 100.0:
        return f"{math.floor(percent * 10) / 10:.1f} %"
    return f"{percent:.1f} %" if abs(percent) < 10 else f"{percent:.0f} %"


def signed_text(ratio: float) -> str:
    """``+12 %`` for 1.12, ``-3.0 %`` for 0.97."""
    # 0.0 % has no minus sign.
    return f"{'-' if round(ratio - 1.0, 3) < 0 else '+'}{percent_text(abs(ratio - 1.0))}"


def span_text(low: float, high: float) -> str:
    """``+4.5 % to +20 %``, of two ratios."""
    return f"{signed_text(low)} to {signed_text(high)}"


def to_seconds(nanoseconds: float) -> float:
    """Seconds, for files and documents."""
    return nanoseconds / NS_PER_S


def to_ns(seconds: float) -> float:
    """Nanoseconds, from files, options and documents. Raises :class:`ValueError` or :class:`TypeError` for no number.

    A text times 10**9 would take all memory.
    """
    return float(seconds) * NS_PER_S


def first_of(names: Sequence[str], most: int, between: str = ", ") -> str:
    """``a, b and 3 more``: the first ``most`` names, and how many there are beside them."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return between.join(names[:most]) + more


def plural(count: int, noun: str) -> str:
    """``1 kernel``, ``2 kernels``, ``3 batches``, ``4 entries``: regular English nouns only."""
    if count == 1:
        return f"1 {noun}"
    if noun.endswith("ry"):
        return f"{count} {noun[:-1]}ies"
    return f"{count} {noun}es" if noun.endswith(("s", "ch", "x")) else f"{count} {noun}s"
