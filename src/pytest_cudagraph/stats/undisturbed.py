"""What a measurement was judged by, for the figures that are shown: they rest on the very blocks of the verdict."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import NamedTuple

from pytest_cudagraph.values import Block, Decision

_FASTEST_SHARE = 0.02
"""The quiet state begins here."""

_NEVER_THE_FASTEST = 20
"""From so many blocks on it does not begin at the fastest of all, which may be a lucky reading."""

_REACH = 6.0
"""In robust standard deviations: nearly all noise stays within, a burst of 10 % on a quiet machine does not."""

_LEAST_REACH = 0.03
"""Of a log-ratio: the speed of a CPU by itself wanders by 1-2 % beside a device, however still the machine is."""

_CLIMBS = 3

_TO_SIGMA = 1.05
"""The median size of the difference of two normal values is 0.954 of their standard deviation."""


class QuietState:
    """Levels and block-to-block noise of both arms, kept sorted because they are asked for after every block."""

    __slots__ = (
        "_eager_ns",
        "_last_product",
        "_last_ratio",
        "_level_steps",
        "_log_ratios",
        "_ratio_steps",
        "_replay_ns",
    )

    def __init__(self) -> None:
        self._eager_ns: list[float] = []
        self._replay_ns: list[float] = []
        self._log_ratios: list[float] = []
        self._level_steps: list[float] = []
        self._ratio_steps: list[float] = []
        self._last_ratio = self._last_product = math.nan

    def add(self, eager_ns: float, replay_ns: float) -> float:
        """Take in a block; gives its log-ratio."""
        # Runs after every block: a third of what a decision costs, and half as much again with tuples and max().
        insort(self._eager_ns, eager_ns)
        insort(self._replay_ns, replay_ns)
        log_ratio, log_product = log(eager_ns / replay_ns), log(eager_ns * replay_ns)
        if self._log_ratios:
            ratio_step, product_step = abs(log_ratio - self._last_ratio), abs(log_product - self._last_product)
            insort(self._ratio_steps, ratio_step)
            # Half of it is the mean size of the steps of both arms.
            insort(self._level_steps, (ratio_step if ratio_step > product_step else product_step) / 2)
        self._last_ratio, self._last_product = log_ratio, log_product
        insort(self._log_ratios, log_ratio)
        return log_ratio

    @property
    def window(self) -> Window:
        """Where the undisturbed blocks are: around the middle of those near the ratio of the quiet states."""
        reach = max(_REACH * _typical(self._ratio_steps), _LEAST_REACH)
        factor = math.exp(_REACH * _typical(self._level_steps))
        centre = log(_quiet_ns(self._eager_ns, factor) / _quiet_ns(self._replay_ns, factor))
        # A lucky reading can move the quiet state, but not where most blocks near it are: climb there.
        logs = self._log_ratios
        for _ in range(_CLIMBS):
            begin, end = bisect_left(logs, centre - reach), bisect_right(logs, centre + reach)
            if begin < end:
                centre = logs[(begin + end) // 2]
        return Window(centre - reach, centre, centre + reach)

    def moved_between(self, one: Window, other: Window) -> int:
        """How many blocks lie between the edges of two windows."""
        logs = self._log_ratios
        at_low = abs(bisect_left(logs, one.low) - bisect_left(logs, other.low))
        return at_low + abs(bisect_right(logs, one.high) - bisect_right(logs, other.high))


class Window(NamedTuple):
    """The log-ratios that belong to the quiet state: within ``low`` and ``high``, both included."""

    low: float
    centre: float
    high: float

    def mirrored_at(self, log_ratio: float) -> Window:
        """As far from this log-ratio on its other side."""
        twice = 2 * log_ratio
        return Window(twice - self.high, twice - self.centre, twice - self.low)


def _typical(steps: Sequence[float]) -> float:
    return _TO_SIGMA * steps[len(steps) // 2] if steps else 0.0


def _quiet_ns(ordered_ns: Sequence[float], factor: float) -> float:
    """The middle of the blocks that are at most ``factor`` slower than the fastest."""
    count = len(ordered_ns)
    fastest_ns = ordered_ns[max(int(count * _FASTEST_SHARE), int(count >= _NEVER_THE_FASTEST))]
    return ordered_ns[(bisect_right(ordered_ns, fastest_ns * factor) - 1) // 2]


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedBlocks:
    """The log-ratios of all blocks, and which of them count."""

    log_ratios: tuple[float, ...]
    """Of every block, in order."""
    window: Window
    """Where the undisturbed ones lie."""
    estimate_log: float
    """Their median, on the verdict's side of the boundary."""
    disturbed: int
    """How many blocks place no bet."""
    is_quiet_known: bool
    """False where most blocks are disturbed, so that nothing tells which are not: then all of them count."""

    @property
    def undisturbed(self) -> list[float]:
        """The log-ratios that the estimate is made of."""
        return _within(self.log_ratios, self.window, self.window)

    def differences(self, log_ratio: float) -> list[float]:
        """What the bets would be placed on if this log-ratio were the boundary; at the boundary, what they were."""
        return [log - log_ratio for log in _within(self.log_ratios, self.window, self.window.mirrored_at(log_ratio))]


def judged_blocks(
    blocks: Sequence[Block], *, boundary_ratio: float | None, decision: Decision, decided_in: Window | None
) -> SelectedBlocks:
    """What counts of these blocks: by the window of a decision, or else by the quiet state as all of them show it.

    Raises :class:`ValueError` without blocks.
    """
    if not blocks:
        raise ValueError("nothing is judged without blocks")
    state = QuietState()
    logs = tuple([state.add(block.eager_ns, block.replay_ns) for block in blocks])
    boundary_log = None if boundary_ratio is None else math.log(boundary_ratio)
    window = decided_in or state.window
    mirrored = window if boundary_log is None else window.mirrored_at(boundary_log)
    betting, quiet = len(_within(logs, window, mirrored)), _within(logs, window, window)
    is_quiet_known = bool(quiet) and 2 * betting >= len(logs)
    if not is_quiet_known:
        window, betting, quiet = Window(-math.inf, statistics.median(logs), math.inf), len(logs), list(logs)
    estimate_log = statistics.median(quiet)
    if decision != "open" and boundary_log is not None:
        is_above = estimate_log >= boundary_log
        # Where the blocks spread over both sides, the rule asks for the side of the window's centre.
        estimate_log = estimate_log if is_above == (decision == "pass") else window.centre
    return SelectedBlocks(
        log_ratios=logs,
        window=window,
        estimate_log=estimate_log,
        disturbed=len(logs) - betting,
        is_quiet_known=is_quiet_known,
    )


def _within(logs: Sequence[float], one: Window, other: Window) -> list[float]:
    (low, _, high), (other_low, _, other_high) = one, other
    return [log for log in logs if low <= log <= high or other_low <= log <= other_high]
