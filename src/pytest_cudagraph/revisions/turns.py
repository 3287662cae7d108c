"""The order in which two sides take their turns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

SideName = Literal["base", "head"]


def turns(first: int, last: int) -> Iterator[tuple[SideName, SideName]]:
    """The order within each pair from number ``first`` on, ``last`` excluded.

    ABBA: who goes first changes from pair to pair, so that a machine that warms up or slows down steadily favours
    neither side.
    """
    for number in range(first, last):
        yield ("base", "head") if number % 2 == 0 else ("head", "base")
