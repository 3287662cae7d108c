"""The betting test: bounded scores of differences, the wealth of the bets, the correlation of the scores."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence

STAKES = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95)
"""The share of capital that each of seven bettors bets on every block. Their mean wealth is the evidence."""

_OTHER_SIDE = tuple(-stake for stake in STAKES)

_MOST_CORRELATION = 0.5
"""The largest correlation that counts: with a larger one a measurement would never end."""


class Scorer:
    """Turns differences into bounded scores: ``clip(x / c, -1, 1)`` with ``c`` the median of the past ``|x|``.

    The scale is *predictable*: it does not depend on the block to be scored. So the wealth of the bets is a martingale
    if positive and negative differences of one size are equally likely. A mean in place of the median would grow in
    bursts, and undisturbed blocks would then score near zero.
    """

    __slots__ = ("_sizes",)

    def __init__(self) -> None:
        self._sizes: list[float] = []

    def score(self, difference: float) -> float:
        """The score of the next difference, within -1..1; its sign while there is no scale."""
        sizes, size = self._sizes, abs(difference)
        scale = sizes[len(sizes) // 2] if sizes else 0.0
        insort(sizes, size)
        if scale <= 0.0:
            return math.copysign(1.0, difference) if difference else 0.0
        score = difference / scale
        return 1.0 if score > 1.0 else -1.0 if score < -1.0 else score  # a third of the time of min and max


class Correlation:
    """The running lag-1 autocorrelation ``r`` of the scores.

    The variance of a sum of AR(1) scores is ``(1 + r) / (1 - r)`` times that of independent scores.
    """

    __slots__ = ("_last", "_products", "_squares", "_total", "count")

    def __init__(self) -> None:
        self.count = 0
        self._last = self._total = self._squares = self._products = 0.0

    def add(self, score: float) -> None:
        """Add the next score."""
        self.count += 1
        self._total += score
        self._squares += score * score
        self._products += score * self._last
        self._last = score

    @property
    def inflation(self) -> float:
        """``(1 + r) / (1 - r)``, at most 3; 1 if ``r`` is within one standard error, and for constant scores."""
        if self.count < 2:
            return 1.0
        mean = self._total / self.count
        variance = self._squares / self.count - mean * mean
        if variance <= 1e-9:
            return 1.0
        correlation = (self._products / (self.count - 1) - mean * mean) / variance
        # Short runs underestimate a correlation about their own mean (Marriott and Pope, Biometrika 41, 1954).
        correlation += (1.0 + 3.0 * correlation) / self.count
        if correlation < 1.0 / math.sqrt(self.count):
            return 1.0
        correlation = min(correlation, _MOST_CORRELATION)
        return (1.0 + correlation) / (1.0 - correlation)


class BettingSide:
    """Seven bettors on one side. Their wealth is computed on request, because mostly only one side is needed."""

    __slots__ = ("_settled", "_stakes", "_wealth")

    def __init__(self, stakes: tuple[float, ...]) -> None:
        self._stakes = stakes
        self._wealth = [1.0] * len(stakes)
        self._settled = 0

    def evidence(self, scores: Sequence[float]) -> float:
        """Their mean wealth after these scores, which extend those of the last call."""
        wealth, stakes = self._wealth, self._stakes
        for score in scores[self._settled :]:
            # No check of the lengths: this line takes most of the time of a decision.
            wealth = [held + held * stake * score for held, stake in zip(wealth, stakes)]  # noqa: B905
        self._wealth, self._settled = wealth, len(scores)
        return sum(wealth) / len(stakes)


class BettingLedger:
    """The wealth of both sides and the correlation of the scores, for all differences booked so far."""

    __slots__ = ("_above", "_below", "_correlation", "_scorer", "_scores")

    def __init__(self) -> None:
        self._scorer = Scorer()
        self._scores: list[float] = []
        self._correlation = Correlation()
        self._above, self._below = BettingSide(STAKES), BettingSide(_OTHER_SIDE)

    def book(self, difference: float) -> None:
        """Bet on one difference."""
        self._scores.append(self._scorer.score(difference))

    @property
    def count(self) -> int:
        """The number of booked differences."""
        return len(self._scores)

    @property
    def above(self) -> float:
        """The evidence for "above zero", before the correction for correlation."""
        return self._above.evidence(self._scores)

    @property
    def below(self) -> float:
        """The evidence for "below zero", before the correction for correlation."""
        return self._below.evidence(self._scores)

    def is_enough(self, found: float, needed: float) -> bool:
        """Whether evidence of this ledger reaches a level, corrected for correlation."""
        if found < needed:
            return False
        # The correlation is updated only when it matters.
        for score in self._scores[self._correlation.count :]:
            self._correlation.add(score)
        return found >= float(needed**self._correlation.inflation)


def evidence(differences: Sequence[float]) -> float:
    """The wealth of bets on "above zero" that start with 1; ``evidence(-x)`` is that for "below zero".

    If the differences are conditionally symmetric about zero, it ever reaches ``1 / alpha`` with probability at most
    ``alpha`` (Ville's inequality). Saturates at infinity and is never NaN.
    """
    scorer = Scorer()
    scores = [scorer.score(difference) for difference in differences]
    return sum(math.prod([1.0 + stake * score for score in scores]) for stake in STAKES) / len(STAKES)
