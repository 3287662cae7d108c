"""When a measurement has seen enough.

:class:`EvidenceRule` bets on the blocks of a measurement and stops at the first well-founded verdict. It may be asked
after every block, and may run longer when it has not decided: the test is *anytime valid*, its error rates hold at
whatever moment one stops (docs/statistics.md). :class:`FixedTimeRule` is for measurements that nobody judges.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pytest_cudagraph.protocols import StoppingRule
from pytest_cudagraph.stats.betting import BettingLedger
from pytest_cudagraph.stats.undisturbed import QuietState, SelectedBlocks, Window, judged_blocks
from pytest_cudagraph.units import NS_PER_S, to_ns
from pytest_cudagraph.values import Block, Decision, UndecidedState

_LOOK_EVERY = 16
"""A look at ``n`` blocks is followed by the next after ``n / 16`` more: to look at each would cost and gain nothing."""

_MANY_BLOCKS = 40
_FEW_BLOCKS_TIMES = 1.2
"""Of the least time, while there are fewer blocks than that: long blocks show less well where a burst ends."""

_FAR_LOG = 0.06
_FAR_TIMES = 2.5
"""Of the least time, for a failure farther below the boundary than that. A burst on replay alone that lasts from the
first block to the last looks exactly so, and only time tells them apart; a red test can wait for it."""


class EvidenceRule:
    """Stops when the speedup is, with confidence, at or above ``target_ratio``, or below it.

    Passes at evidence ``1 / pass_alpha`` and fails at ``1 / fail_alpha`` against the boundary
    ``target_ratio * (1 - tolerance)``, once ``min_blocks`` blocks and ``min_time_ns`` are spent: 1.2 times as much
    with fewer than 40 blocks, 2.5 times for a failure by more than 6 %. Blocks in which one arm alone was disturbed do
    not count, unless as many might be disturbed the other way round (they lie where the quiet ones would, mirrored at
    the boundary); they must be the lesser half, and the others must lie on the verdict's side. Where the scores hang
    together, their evidence counts for less. Raises :class:`ValueError` for a parameter out of range. Costs some 4 µs
    per block.
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
        self._target_ratio = target_ratio
        self._boundary_ratio = target_ratio * (1.0 - tolerance)
        self._boundary_log = math.log(self._boundary_ratio)
        self._pass_evidence = 1.0 / pass_alpha
        self._fail_evidence = 1.0 / fail_alpha
        self._min_blocks = self._next_look = min_blocks
        self._min_time_ns = min_time_ns
        self._quiet = QuietState()
        self._log_ratios: list[float] = []
        self._ledger = BettingLedger()
        self._booked = 0
        self._elapsed_ns = 0.0
        self._window = Window(0.0, 0.0, 0.0)
        self._mirrored = self._window.mirrored_at(self._boundary_log)
        self._decision: Decision = "open"

    @property
    def target_ratio(self) -> float:
        """The speedup asked for."""
        return self._target_ratio

    @property
    def boundary_ratio(self) -> float:
        """The speedup actually tested: the target less the tolerance that systematic errors of timing need."""
        return self._boundary_ratio

    @property
    def decision(self) -> Decision:
        """``pass`` or ``fail`` once :meth:`is_finished` has said so; never taken back."""
        return self._decision

    @property
    def decided_in(self) -> Window | None:
        """Where the undisturbed blocks lie that decided; None while nothing is decided."""
        return None if self._decision == "open" else self._window

    def add(self, block: Block) -> None:
        """Take in one block. The latencies of both arms must be above zero."""
        self._log_ratios.append(self._quiet.add(block.eager_ns, block.replay_ns))

    def is_finished(self, elapsed_ns: float) -> bool:
        """Whether the blocks so far decide; ``elapsed_ns`` counts from the first sample of the measurement."""
        if self._decision != "open":
            return True
        self._elapsed_ns, count = elapsed_ns, len(self._log_ratios)
        if count < self._next_look or elapsed_ns < self._least_ns:
            return False
        self._next_look = count + 1 + count // _LOOK_EVERY
        decision = self._weigh()
        if decision != "fail" or elapsed_ns >= self._least_ns_to_fail(self._window):
            self._decision = decision
        return self._decision != "open"

    def weighed(self) -> UndecidedState | None:
        """What there was to go by when it was last asked; None where it was never given a block."""
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

    def _weigh(self) -> Decision:
        # The quiet state as seen now sorts the past too. Where few blocks change sides, the bets stand; but a verdict
        # rests on exactly those that belong to it now.
        self._open(self._quiet.window, at_most=len(self._log_ratios) // _LOOK_EVERY)
        decision = self._decided()
        if decision != "open" and self._open(self._quiet.window, at_most=0):
            decision = self._decided()
        return decision

    def _open(self, window: Window, *, at_most: int) -> bool:
        """Book by this window, unless ``at_most`` so many blocks change sides; says whether all was booked anew."""
        mirrored, moved_between = window.mirrored_at(self._boundary_log), self._quiet.moved_between
        is_new = moved_between(window, self._window) + moved_between(mirrored, self._mirrored) > at_most
        if is_new:
            self._window, self._mirrored, self._ledger, self._booked = window, mirrored, BettingLedger(), 0
        self._book()
        return is_new

    def _book(self) -> None:
        # What lies as far on the boundary's other side counts too: a choice of blocks that treats both sides alike
        # cannot make one of them win. Where in most blocks one arm or the other waits, there is no quiet state.
        boundary_log, book = self._boundary_log, self._ledger.book
        (low, _, high), (mirrored_low, _, mirrored_high) = self._window, self._mirrored
        for log_ratio in self._log_ratios[self._booked :]:
            if low <= log_ratio <= high or mirrored_low <= log_ratio <= mirrored_high:
                book(log_ratio - boundary_log)
        self._booked = len(self._log_ratios)

    def _decided(self) -> Decision:
        ledger = self._ledger
        if ledger.count < self._min_blocks or 2 * ledger.count < self._booked:
            return "open"
        if self._window.centre >= self._boundary_log:
            return "pass" if ledger.is_enough(ledger.above, self._pass_evidence) else "open"
        return "fail" if ledger.is_enough(ledger.below, self._fail_evidence) else "open"


class FixedTimeRule:
    """Stops after a fixed time and a few blocks, and decides nothing: for rehearsals, where speed is not judged."""

    def __init__(self, *, time_ns: float = to_ns(0.3), min_blocks: int = 10) -> None:
        self._time_ns = time_ns
        self._min_blocks = min_blocks
        self._blocks = 0

    @property
    def target_ratio(self) -> None:
        """None: there is no target."""
        return None

    @property
    def boundary_ratio(self) -> None:
        """None: nothing is tested."""
        return None

    @property
    def decision(self) -> Decision:
        """Always ``open``."""
        return "open"

    def add(self, block: Block) -> None:
        """Count the block."""
        self._blocks += 1

    def is_finished(self, elapsed_ns: float) -> bool:
        """Whether both the time and the number of blocks are reached."""
        return self._blocks >= self._min_blocks and elapsed_ns >= self._time_ns


def judged(rule: StoppingRule, blocks: Sequence[Block]) -> SelectedBlocks:
    """Which of the blocks that ``rule`` was given its decision rests on, or would rest on if there were one.

    Raises :class:`ValueError` without blocks.
    """
    decided_in = rule.decided_in if isinstance(rule, EvidenceRule) else None
    return judged_blocks(blocks, boundary_ratio=rule.boundary_ratio, decision=rule.decision, decided_in=decided_in)
