"""What a measurement was judged by, for the figures that are shown: they rest on the very blocks of the verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_cudagraph.stopping.quiet import QuietState, Window
from pytest_cudagraph.values import Block, Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
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
) -> Judged:
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
    return Judged(
        log_ratios=logs,
        window=window,
        estimate_log=estimate_log,
        disturbed=len(logs) - betting,
        is_quiet_known=is_quiet_known,
    )


def _within(logs: Sequence[float], one: Window, other: Window) -> list[float]:
    (low, _, high), (other_low, _, other_high) = one, other
    return [log for log in logs if low <= log <= high or other_low <= log <= other_high]
