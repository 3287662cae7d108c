"""How often ``pytest-cudagraph history`` marks unchanged sessions, and how often it finds a step, simulated.

500 histories of 40 sessions for each spread between sessions. Docs/statistics.md says what spreads were seen.
"""

from __future__ import annotations

import random

from pytest_cudagraph.baseline.change_points import split_at_moves
from pytest_cudagraph.values import Session

HISTORIES, SESSIONS, LEVEL_NS, REFERENCE_NS = 500, 40, 60_000.0, 100_000.0


def history(draw: random.Random, spread: float, step: float = 0.0) -> list[Session]:
    """Sessions of one level, with a step in the middle."""
    levels = [LEVEL_NS * (1 + step * (at >= SESSIONS // 2)) * draw.gauss(1, spread) for at in range(SESSIONS)]
    return [
        Session(
            date=str(at), commit="", software="", q25_ns=level * 0.99, median_ns=level,
            reference_q25_ns=REFERENCE_NS * 0.99, reference_median_ns=REFERENCE_NS,
        )
        for at, level in enumerate(levels)
    ]  # fmt: skip


def main() -> None:
    draw = random.Random(1)
    for spread in (0.004, 0.013, 0.027):
        for least in (0.0, 0.02):
            false = sum(len(split_at_moves("replay", history(draw, spread), least)[1]) for _ in range(HISTORIES))
            marked = false / HISTORIES / (SESSIONS - 1)
            found = [_found(draw, spread, step, least) for step in (0.05, 0.10)]
            print(f"spread {spread:.1%}, --least-change={least}: {marked:.1%} of unchanged sessions marked, "
                  f"+5 % found in {found[0]:.0%}, +10 % in {found[1]:.0%}")  # fmt: skip


def _found(draw: random.Random, spread: float, step: float, least: float) -> float:
    """The share of histories whose step is marked at its session or at the next one."""
    near = {str(SESSIONS // 2), str(SESSIONS // 2 + 1)}
    moves = [split_at_moves("replay", history(draw, spread, step), least)[1] for _ in range(HISTORIES)]
    return sum(any(move.after.date in near for move in own) for own in moves) / HISTORIES


if __name__ == "__main__":
    main()
