"""When a measurement has seen enough.

:class:`EvidenceRule` bets on the blocks of a measurement and stops at the first well-founded verdict. It may be asked
after every block, and may run longer when it has not decided: the test is *anytime valid*, its error rates hold at
whatever moment one stops (docs/statistics.md). :class:`FixedTimeRule` is for measurements that nobody judges.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence

from pytest_cudagraph.units import NS_PER_S, to_ns
from pytest_cudagraph.values import Block, Decision

STAKES = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95)
"""The shares of its capital that each of seven gamblers bets on every block; their mean wealth is the evidence."""

_OUTLIER_CAP = 3.0
"""A block raises the running scale as if it were at most this multiple of it: one burst must not blunt later bets."""


class Scorer:
    """Turns differences into bounded bets: ``clip(x / c, -1, 1)`` with ``c`` the running mean of the past ``|x|``.

    The scale is *predictable*: it never looks at the block it is about to score, which is what keeps the product of
    the bets a martingale when positive and negative differences of one size are equally likely.
    """

    __slots__ = ("_count", "_total")

    def __init__(self) -> None:
        self._count = 0
        self._total = 0.0

    def score(self, difference: float) -> float:
        """The score of the next difference, within -1..1; the sign alone while there is no scale yet."""
        size = abs(difference)
        scale = self._total / self._count if self._count else 0.0
        self._count += 1
        if scale <= 0.0:
            self._total += size
            return math.copysign(1.0, difference) if difference else 0.0
        self._total += min(size, _OUTLIER_CAP * scale)
        return max(-1.0, min(1.0, difference / scale))


def evidence(differences: Sequence[float]) -> float:
    """The wealth that betting on "above zero" made of a capital of 1; ``evidence(-x)`` is that of "below zero".

    Its chance of ever reaching ``1 / alpha`` is at most ``alpha`` when the differences are conditionally symmetric
    about zero (Ville's inequality). Saturates at infinity, never NaN.
    """
    scorer = Scorer()
    scores = [scorer.score(difference) for difference in differences]
    return sum(math.prod([1.0 + stake * score for score in scores]) for stake in STAKES) / len(STAKES)


class EvidenceRule:
    """Stops when the speedup is, with confidence, at or above ``target_ratio``, or below it.

    Passes at evidence ``1 / pass_alpha`` and fails at ``1 / fail_alpha`` against the boundary
    ``target_ratio * (1 - tolerance)``, once ``min_blocks`` blocks and ``min_time_ns`` are spent, and only if the
    quiet state agrees: the ratio of the two arms' ``quiet_quantile`` must lie on the same side, because a burst that
    hits one arm alone would move the paired ratio without any change of the code. Raises :class:`ValueError` for a
    parameter out of range. Costs some 3 µs per block.
    """

    def __init__(
        self,
        target_ratio: float,
        *,
        tolerance: float = 0.005,
        pass_alpha: float = 0.01,
        fail_alpha: float = 0.001,
        min_blocks: int = 10,
        min_time_ns: float = 0.2 * NS_PER_S,
        quiet_quantile: float = 0.10,
    ) -> None:
        if not (math.isfinite(target_ratio) and target_ratio > 0):
            raise ValueError(f"target_ratio must be a positive number, not {target_ratio!r}")
        for name, value in (("pass_alpha", pass_alpha), ("fail_alpha", fail_alpha)):
            if not 0 < value < 1:
                raise ValueError(f"{name} must lie between 0 and 1, not {value!r}")
        for name, value in (("tolerance", tolerance), ("quiet_quantile", quiet_quantile)):
            if not 0 <= value < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, not {value!r}")
        if min_blocks < 1:
            raise ValueError(f"min_blocks must be at least 1, not {min_blocks!r}")
        self._target_ratio = target_ratio
        self._boundary_ratio = target_ratio * (1.0 - tolerance)
        self._boundary_log = math.log(self._boundary_ratio)
        self._pass_wealth = len(STAKES) / pass_alpha
        self._fail_wealth = len(STAKES) / fail_alpha
        self._min_blocks = min_blocks
        self._min_time_ns = min_time_ns
        self._quiet_quantile = quiet_quantile
        self._scorer = Scorer()
        self._above = [1.0] * len(STAKES)
        self._below = [1.0] * len(STAKES)
        self._eager_sorted_ns: list[float] = []
        self._replay_sorted_ns: list[float] = []
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

    def add(self, block: Block) -> None:
        """Bet on one block and settle the bet. The latencies of both arms must be above zero."""
        score = self._scorer.score(math.log(block.eager_ns / block.replay_ns) - self._boundary_log)
        self._above = [wealth * (1.0 + stake * score) for wealth, stake in zip(self._above, STAKES, strict=True)]
        self._below = [wealth * (1.0 - stake * score) for wealth, stake in zip(self._below, STAKES, strict=True)]
        insort(self._eager_sorted_ns, block.eager_ns)
        insort(self._replay_sorted_ns, block.replay_ns)

    def is_finished(self, elapsed_ns: float) -> bool:
        """Whether the blocks so far decide; ``elapsed_ns`` counts from the first sample of the measurement."""
        if self._decision == "open" and len(self._eager_sorted_ns) >= self._min_blocks:
            self._decision = self._weigh() if elapsed_ns >= self._min_time_ns else "open"
        return self._decision != "open"

    def _weigh(self) -> Decision:
        if sum(self._above) >= self._pass_wealth and self._quiet_ratio() >= self._boundary_ratio:
            return "pass"
        if sum(self._below) >= self._fail_wealth and self._quiet_ratio() < self._boundary_ratio:
            return "fail"
        return "open"

    def _quiet_ratio(self) -> float:
        # The same order statistic as stats.quantile; kept sorted here, because it is asked for after every block.
        index = int((len(self._eager_sorted_ns) - 1) * self._quiet_quantile)
        return self._eager_sorted_ns[index] / self._replay_sorted_ns[index]


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
