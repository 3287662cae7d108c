"""Selects the undisturbed blocks, which verdict, estimate and interval all rest on."""

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
"""The quantile of an arm's blocks that counts as its fastest."""

_NEVER_THE_FASTEST = 20
"""From this many blocks on, the very fastest does not count: it may be a lucky reading."""

_REACH = 6.0
"""In robust standard deviations. Nearly all noise is within; a burst of 10 % on a quiet machine is not."""

_LEAST_REACH = 0.03
"""In log-ratios: even on an idle machine the speed of a CPU varies by 1-2 % against a device."""

_CLIMBS = 3

_TO_SIGMA = 1.05
"""1 / 0.954: the median distance of two normal values is 0.954 standard deviations."""


class QuietState:
    """Levels and block-to-block noise of both arms; sorted, because they are read after every block."""

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
        """Add a block and return its log-ratio."""
        # Runs after every block: a third of the time of a decision. Tuples and max() would add half as much.
        insort(self._eager_ns, eager_ns)
        insort(self._replay_ns, replay_ns)
        log_ratio, log_product = log(eager_ns / replay_ns), log(eager_ns * replay_ns)
        if self._log_ratios:
            ratio_step, product_step = abs(log_ratio - self._last_ratio), abs(log_product - self._last_product)
            insort(self._ratio_steps, ratio_step)
            # Half of the larger one is the mean step of both arms.
            insort(self._level_steps, (ratio_step if ratio_step > product_step else product_step) / 2)
        self._last_ratio, self._last_product = log_ratio, log_product
        insort(self._log_ratios, log_ratio)
        return log_ratio

    @property
    def window(self) -> Window:
        """The log-ratios of undisturbed blocks, around the median of those near the ratio of both quiet levels."""
        reach = max(_REACH * _typical(self._ratio_steps), _LEAST_REACH)
        factor = math.exp(_REACH * _typical(self._level_steps))
        centre = log(_quiet_ns(self._eager_ns, factor) / _quiet_ns(self._replay_ns, factor))
        # A lucky reading can shift a quiet level, so move to where most blocks near it are.
        logs = self._log_ratios
        for _ in range(_CLIMBS):
            begin, end = bisect_left(logs, centre - reach), bisect_right(logs, centre + reach)
            if begin < end:
                centre = logs[(begin + end) // 2]
        return Window(centre - reach, centre, centre + reach)

    def moved_between(self, one: Window, other: Window) -> int:
        """The number of blocks between the edges of two windows."""
        logs = self._log_ratios
        at_low = abs(bisect_left(logs, one.low) - bisect_left(logs, other.low))
        return at_low + abs(bisect_right(logs, one.high) - bisect_right(logs, other.high))


class Window(NamedTuple):
    """A range of log-ratios, from ``low`` to ``high``, both included."""

    low: float
    centre: float
    high: float

    def mirrored_at(self, log_ratio: float) -> Window:
        """The mirror image at this log-ratio."""
        twice = 2 * log_ratio
        return Window(twice - self.high, twice - self.centre, twice - self.low)


def _typical(steps: Sequence[float]) -> float:
    return _TO_SIGMA * steps[len(steps) // 2] if steps else 0.0


def _quiet_ns(ordered_ns: Sequence[float], factor: float) -> float:
    """The median of the blocks that are at most ``factor`` slower than the fastest."""
    count = len(ordered_ns)
    fastest_ns = ordered_ns[max(int(count * _FASTEST_SHARE), int(count >= _NEVER_THE_FASTEST))]
    return ordered_ns[(bisect_right(ordered_ns, fastest_ns * factor) - 1) // 2]


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedBlocks:
    """The log-ratios of all blocks, and the selection of those that count."""

    log_ratios: tuple[float, ...]
    """Of every block, in order."""
    window: Window
    """The window of the undisturbed blocks."""
    estimate_log: float
    """The median of the undisturbed blocks, on the verdict's side of the boundary."""
    disturbed: int
    """The number of blocks without a bet."""
    is_quiet_known: bool
    """False if more than half are disturbed. Then the quiet state is unknown, and all blocks count."""

    @property
    def undisturbed(self) -> list[float]:
        """The log-ratios that the estimate is computed from."""
        return _within(self.log_ratios, self.window, self.window)

    def differences(self, log_ratio: float) -> list[float]:
        """The differences that would be bet on if this log-ratio were the boundary."""
        return [log - log_ratio for log in _within(self.log_ratios, self.window, self.window.mirrored_at(log_ratio))]


def select_blocks(
    blocks: Sequence[Block], *, boundary_ratio: float | None, decision: Decision, decided_in: Window | None
) -> SelectedBlocks:
    """Select by the window of a decision, else by the quiet state of all these blocks.

    Raises :class:`ValueError` without blocks.
    """
    if not blocks:
        raise ValueError("a selection needs at least one block")
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
        # If the blocks spread over both sides, the centre of the window decides, as in the rule.
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
