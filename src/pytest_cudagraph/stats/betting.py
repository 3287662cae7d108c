"""Betting on differences: bounded scores, the wealth they make, and how much they hang together."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence

STAKES = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95)
"""The shares of its capital that each of seven gamblers bets on every block; their mean wealth is the evidence."""

_OTHER_SIDE = tuple(-stake for stake in STAKES)

_MOST_CORRELATION = 0.5
"""Stronger correlation counts as this much: beyond it a measurement would never end."""


class Scorer:
    """Turns differences into bounded bets: ``clip(x / c, -1, 1)`` with ``c`` the median of the past ``|x|``.

    The scale is *predictable*: it never looks at the block it is about to score, which is what keeps the product of
    the bets a martingale when positive and negative differences of one size are equally likely. The median is not moved
    by bursts; a mean was, until the quiet blocks between them weighed next to nothing.
    """

    __slots__ = ("_sizes",)

    def __init__(self) -> None:
        self._sizes: list[float] = []

    def score(self, difference: float) -> float:
        """The score of the next difference, within -1..1; the sign alone while there is no scale yet."""
        sizes, size = self._sizes, abs(difference)
        scale = sizes[len(sizes) // 2] if sizes else 0.0
        insort(sizes, size)
        if scale <= 0.0:
            return math.copysign(1.0, difference) if difference else 0.0
        score = difference / scale
        return 1.0 if score > 1.0 else -1.0 if score < -1.0 else score  # a third of what min and max would take


class Correlation:
    """How much less the scores say than as many independent ones: a running lag-1 autocorrelation ``r``.

    A sum of scores that hang together as AR(1) varies ``(1 + r) / (1 - r)`` times as much as one of independent scores.
    """

    __slots__ = ("_last", "_products", "_squares", "_total", "count")

    def __init__(self) -> None:
        self.count = 0
        self._last = self._total = self._squares = self._products = 0.0

    def add(self, score: float) -> None:
        """Take in the next score."""
        self.count += 1
        self._total += score
        self._squares += score * score
        self._products += score * self._last
        self._last = score

    @property
    def inflation(self) -> float:
        """1 for what chance explains (one standard error) and for scores that never vary; at most 3."""
        if self.count < 2:
            return 1.0
        mean = self._total / self.count
        variance = self._squares / self.count - mean * mean
        if variance <= 1e-9:
            return 1.0
        correlation = (self._products / (self.count - 1) - mean * mean) / variance
        # Taken about its own mean, it comes out too small in short runs (Marriott and Pope, Biometrika 41, 1954).
        correlation += (1.0 + 3.0 * correlation) / self.count
        if correlation < 1.0 / math.sqrt(self.count):
            return 1.0
        correlation = min(correlation, _MOST_CORRELATION)
        return (1.0 + correlation) / (1.0 - correlation)


class BettingSide:
    """Seven gamblers who bet on one side. Their bets are settled when one asks: mostly nobody asks for the other."""

    __slots__ = ("_settled", "_stakes", "_wealth")

    def __init__(self, stakes: tuple[float, ...]) -> None:
        self._stakes = stakes
        self._wealth = [1.0] * len(stakes)
        self._settled = 0

    def evidence(self, scores: Sequence[float]) -> float:
        """Their mean wealth after these scores, of which those settled before stay as they were."""
        wealth, stakes = self._wealth, self._stakes
        for score in scores[self._settled :]:
            # No check of the lengths: this line is most of what a decision costs.
            wealth = [held + held * stake * score for held, stake in zip(wealth, stakes)]  # noqa: B905
        self._wealth, self._settled = wealth, len(scores)
        return sum(wealth) / len(stakes)


class BettingLedger:
    """The wealth of both sides and the correlation of the scores, over the differences booked so far."""

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
        """How many differences were booked."""
        return len(self._scores)

    @property
    def above(self) -> float:
        """The evidence for "above zero", without regard to correlation."""
        return self._above.evidence(self._scores)

    @property
    def below(self) -> float:
        """The evidence for "below zero"."""
        return self._below.evidence(self._scores)

    def is_enough(self, found: float, needed: float) -> bool:
        """Whether evidence of this ledger reaches a level, correlation allowed for."""
        if found < needed:
            return False
        # Only now is the correlation asked for.
        for score in self._scores[self._correlation.count :]:
            self._correlation.add(score)
        return found >= float(needed**self._correlation.inflation)


def evidence(differences: Sequence[float]) -> float:
    """The wealth that betting on "above zero" made of a capital of 1; ``evidence(-x)`` is that of "below zero".

    Its chance of ever reaching ``1 / alpha`` is at most ``alpha`` when the differences are conditionally symmetric
    about zero (Ville's inequality). Saturates at infinity, never NaN.
    """
    scorer = Scorer()
    scores = [scorer.score(difference) for difference in differences]
    return sum(math.prod([1.0 + stake * score for score in scores]) for stake in STAKES) / len(STAKES)
