"""Rules that decide when a measurement stops.

:class:`EvidenceRule` bets on the blocks of a measurement and stops at the first verdict. The test is *anytime valid*:
its error rates hold for any moment at which a measurement stops or goes on (docs/statistics.md). :class:`FixedTimeRule`
is for measurements without a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pytest_cudagraph.protocols import StoppingRule
from pytest_cudagraph.stats.betting import BettingLedger
from pytest_cudagraph.stats.undisturbed import QuietState, SelectedBlocks, Window, select_blocks
from pytest_cudagraph.units import NS_PER_S, to_ns
from pytest_cudagraph.values import Block, Decision, UndecidedState

_LOOK_EVERY = 16
"""After a look at ``n`` blocks, the next look is after ``n / 16`` more. Looks at each would only take time."""

_MANY_BLOCKS = 40
_FEW_BLOCKS_TIMES = 1.2
"""The factor on the minimum time with fewer blocks: long blocks show the end of a burst less clearly."""

_FAR_LOG = 0.06
_FAR_TIMES = 2.5
"""The factor on the minimum time for a failure farther below the boundary. A burst on replay alone that began
before the first block looks the same, and only time distinguishes them."""


class EvidenceRule:
    """Stops when the speedup is, with confidence, at or above ``target_ratio``, or below it.

    The tested boundary is ``target_ratio * (1 - tolerance)``. Passes at evidence ``1 / pass_alpha`` and fails at
    ``1 / fail_alpha``, after ``min_blocks`` blocks and ``min_time_ns``. With fewer than 40 blocks the time is 1.2 times
    as long. For a failure by more than 6 % it is 2.5 times as long.

    Blocks in which only one arm was slowed are excluded. To avoid bias, blocks in the mirror image of the accepted
    window, at the boundary, are kept. There is no verdict if more than half are excluded. The centre of the window must
    lie on the verdict's side. Correlated scores need more evidence.

    Raises :class:`ValueError` for a parameter out of range. Takes about 4 µs per block.
    """

    def __init__(
        self,
        target_ratio: float,
        *,
        tolerance: float = 0.005,
        pass_alpha: float = 0.01,
        fail_alpha: float = 0.001,
        min_blocks: int = 10,
        min_time_ns: float = 0.25 * NS_PER_S,
    ) -> None:
        if not (math.isfinite(target_ratio) and target_ratio > 0):
            raise ValueError(f"target_ratio must be a positive number, not {target_ratio!r}")
        for name, value in (("pass_alpha", pass_alpha), ("fail_alpha", fail_alpha)):
            if not 0 < value < 1:
                raise ValueError(f"{name} must lie between 0 and 1, not {value!r}")
        if not 0 <= tolerance < 1:
            raise ValueError(f"tolerance must be at least 0 and below 1, not {tolerance!r}")
        if min_blocks < 1:
            raise ValueError(f"min_blocks must be at least 1, not {min_blocks!r}")
        self.target_ratio = target_ratio
        self.boundary_ratio = target_ratio * (1.0 - tolerance)  # the tested speedup: timing has systematic errors
        self._boundary_log = math.log(self.boundary_ratio)
        self._pass_evidence = 1.0 / pass_alpha
        self._fail_evidence = 1.0 / fail_alpha
        self._min_blocks = self._next_look = min_blocks
        self._min_time_ns = min_time_ns
        self._quiet = QuietState()
        self._log_ratios: list[float] = []
        self._elapsed_ns = 0.0
        self._bets = _Bets(Window(0.0, 0.0, 0.0), self._boundary_log)
        self.decision: Decision = "open"  # does not change after ``pass`` or ``fail``

    @property
    def decided_in(self) -> Window | None:
        """The window of the blocks that decided; None without a decision."""
        return None if self.decision == "open" else self._bets.window

    def add(self, block: Block) -> None:
        """Add one block. The latencies of both arms must be above zero."""
        self._log_ratios.append(self._quiet.add(block.eager_ns, block.replay_ns))

    def is_finished(self, elapsed_ns: float) -> bool:
        """Whether the blocks so far give a verdict; ``elapsed_ns`` counts from the first sample of the measurement."""
        if self.decision != "open":
            return True
        self._elapsed_ns, count = elapsed_ns, len(self._log_ratios)
        if count < self._next_look or elapsed_ns < self._least_ns:
            return False
        self._next_look = count + 1 + count // _LOOK_EVERY
        decision = self._look()
        if decision != "fail" or elapsed_ns >= self._least_ns_to_fail(self._bets.window):
            self.decision = decision
        return self.decision != "open"

    def weighed(self) -> UndecidedState | None:
        """The evidence state at the last :meth:`is_finished`; None without blocks."""
        if not self._log_ratios:
            return None
        window = self._quiet.window
        mirrored = window.mirrored_at(self._boundary_log)
        return UndecidedState(
            quiet=sum(any(one.low <= log <= one.high for one in (window, mirrored)) for log in self._log_ratios),
            least_blocks=self._min_blocks,
            elapsed_ns=self._elapsed_ns,
            least_ns=max(self._least_ns, self._least_ns_to_fail(window)),
        )

    @property
    def _least_ns(self) -> float:
        is_few = len(self._log_ratios) < _MANY_BLOCKS
        return self._min_time_ns * _FEW_BLOCKS_TIMES if is_few else self._min_time_ns

    def _least_ns_to_fail(self, window: Window) -> float:
        return self._min_time_ns * (_FAR_TIMES if window.centre < self._boundary_log - _FAR_LOG else 1.0)

    def _look(self) -> Decision:
        window = self._quiet.window
        moved = self._quiet.moved_between(window, self._bets.window)
        moved += self._quiet.moved_between(window.mirrored_at(self._boundary_log), self._bets.mirrored)
        # The present window selects the past blocks too. While few of them enter or leave it, the earlier bets stand.
        if moved > len(self._log_ratios) // _LOOK_EVERY:
            self._bets, moved = _Bets(window, self._boundary_log), 0
        decision = self._decided()
        # A verdict rests on exactly the blocks that the present window selects.
        if decision != "open" and moved:
            self._bets = _Bets(window, self._boundary_log)
            decision = self._decided()
        return decision

    def _decided(self) -> Decision:
        bets, ledger = self._bets, self._bets.ledger
        bets.place(self._log_ratios)
        if ledger.count < self._min_blocks or 2 * ledger.count < bets.seen:
            return "open"
        if bets.window.centre >= self._boundary_log:
            return "pass" if ledger.is_enough(ledger.above, self._pass_evidence) else "open"
        return "fail" if ledger.is_enough(ledger.below, self._fail_evidence) else "open"


class _Bets:
    """The bets on the blocks of one window, and of its mirror image at the boundary.

    Without the mirror image, the selection of blocks could favour one verdict.
    """

    __slots__ = ("_boundary_log", "ledger", "mirrored", "seen", "window")

    def __init__(self, window: Window, boundary_log: float) -> None:
        self.window, self.mirrored = window, window.mirrored_at(boundary_log)
        self.ledger, self.seen, self._boundary_log = BettingLedger(), 0, boundary_log

    def place(self, log_ratios: Sequence[float]) -> None:
        """Bet on the blocks that were added since the last call."""
        boundary_log, book = self._boundary_log, self.ledger.book
        (low, _, high), (mirrored_low, _, mirrored_high) = self.window, self.mirrored
        for log_ratio in log_ratios[self.seen :]:
            if low <= log_ratio <= high or mirrored_low <= log_ratio <= mirrored_high:
                book(log_ratio - boundary_log)
        self.seen = len(log_ratios)


class FixedTimeRule:
    """Stops after a fixed time and a few blocks, without a verdict: for measurements whose speed is not judged."""

    target_ratio = boundary_ratio = None
    decision: Decision = "open"

    def __init__(self, *, time_ns: float = to_ns(0.3), min_blocks: int = 10) -> None:
        self._time_ns = time_ns
        self._min_blocks = min_blocks
        self._blocks = 0

    def add(self, block: Block) -> None:
        """Count the block."""
        self._blocks += 1

    def is_finished(self, elapsed_ns: float) -> bool:
        """Whether the time and the number of blocks are reached."""
        return self._blocks >= self._min_blocks and elapsed_ns >= self._time_ns


def blocks_judged_by(rule: StoppingRule, blocks: Sequence[Block]) -> SelectedBlocks:
    """The blocks that the decision of ``rule`` rests on, or would rest on without one yet.

    Raises :class:`ValueError` without blocks.
    """
    decided_in = rule.decided_in if isinstance(rule, EvidenceRule) else None
    return select_blocks(blocks, boundary_ratio=rule.boundary_ratio, decision=rule.decision, decided_in=decided_in)
