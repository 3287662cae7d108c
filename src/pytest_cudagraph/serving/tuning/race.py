"""A race: candidates are timed in turn, and each leaves as soon as the leader is known to be no worse.

The test is that of the speed gate (:mod:`pytest_cudagraph.stats.betting`): it is valid at any moment. A candidate
leaves when the bets show that it is not faster than the leader by more than the tolerance. With ``m`` candidates there
are ``m (m - 1)`` ordered pairs, so each needs the evidence ``m (m - 1) / alpha``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Generic, Literal, TypeVar

from pytest_cudagraph.stats.betting import BettingLedger

K = TypeVar("K", bound=Hashable)

Place = Literal["best", "ties", "slower", "undecided"]
"""``ties`` and ``slower``: known to be no better than the leader, and measured within the tolerance of it, or not.
``undecided``: the time ended before that was known.
"""

LEAST_ROUNDS = 10
_LOOK_EVERY = 16
"""After a look at ``n`` rounds, the next look is after ``n / 16`` more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceResult(Generic[K]):
    """The winner, and by candidate its place and the logarithms of its costs, one for each round."""

    best: K
    places: dict[K, Place]
    log_costs: dict[K, list[float]]

    def behind_logs(self, candidate: K) -> tuple[float, ...]:
        """How much more than the best a candidate costs, as a log-ratio of each round that both ran.

        A slow machine slows both.
        """
        return _differences(self.log_costs[candidate], self.log_costs[self.best])

    @property
    def samples(self) -> int:
        """The number of samples in all."""
        return sum(map(len, self.log_costs.values()))


def _differences(logs: Sequence[float], best_logs: Sequence[float]) -> tuple[float, ...]:
    """Of the rounds that both ran: whoever left, left at the end."""
    return tuple(log - best_log for log, best_log in zip(logs, best_logs, strict=False))


def is_above(behind_logs: Sequence[float], limit_log: float, *, alpha: float) -> bool:
    """Whether the bets on these differences show that they lie above a limit, at level ``alpha``."""
    ledger = BettingLedger()
    for behind_log in behind_logs:
        ledger.book(behind_log - limit_log)
    return ledger.is_enough(ledger.above, 1.0 / alpha)


def race(
    candidates: Sequence[K],
    sample: Callable[[K], float],
    *,
    is_over: Callable[[int], bool],
    may_settle: Callable[[], bool] = lambda: True,
    counts: Callable[[int], bool | None] = lambda pending: True,
    seed: int,
    tolerance: float = 0.02,
    alpha: float = 0.05,
) -> RaceResult[K] | None:
    """Sample the cost of each candidate once a round, in random order, until one is left or ``is_over(rounds)``.

    Costs are above zero, and lower is better. The winner is not worse than any other by more than ``tolerance``, with
    probability ``1 - alpha``, unless places are undecided. There are at least 10 rounds. While ``may_settle()`` is
    False nobody leaves. ``counts`` is asked after each round about those since its last answer: whether they count, or
    None for later. The result is None if no round counts.
    """
    field, rng = _Field(list(candidates), tolerance, alpha), random.Random(seed)
    rounds, pending, next_look = 0, 0, LEAST_ROUNDS
    while len(field.alive) > 1 or rounds < LEAST_ROUNDS or pending or not may_settle():
        for candidate in rng.sample(field.alive, len(field.alive)):
            field.log_costs[candidate].append(math.log(sample(candidate)))
        pending += 1
        counted = counts(pending)
        if counted is None:
            continue
        if not counted:
            field.discard(pending)
        rounds, pending = rounds + pending * counted, 0
        if rounds >= next_look:
            next_look = rounds + 1 + rounds // _LOOK_EVERY
            if may_settle():
                field.drop_the_settled()
        elif counted:
            continue
        if is_over(rounds):
            break
    return field.result() if rounds else None


class _Field(Generic[K]):
    """The candidates that are still in the race, and the bets of each against each leader so far."""

    def __init__(self, candidates: list[K], tolerance: float, alpha: float) -> None:
        self.alive = candidates
        self.log_costs: dict[K, list[float]] = {each: [] for each in candidates}
        self._tolerance, self._alpha = tolerance, alpha
        self._needed = max(len(candidates) * (len(candidates) - 1), 1) / alpha
        self._ledgers: dict[tuple[K, K], BettingLedger] = {}
        self._left: list[K] = []

    @property
    def leader(self) -> K:
        """The candidate with the least median cost."""
        return min(self.alive, key=lambda each: median(self.log_costs[each]))

    def discard(self, rounds: int) -> None:
        """Forget the last rounds. No look was taken at them."""
        for candidate in self.alive:
            del self.log_costs[candidate][-rounds:]

    def drop_the_settled(self) -> None:
        """Let every candidate leave that is known to be no better than the leader, beyond the tolerance."""
        leader = self.leader
        settled = [each for each in self.alive if each != leader and self._is_settled(each, leader)]
        self._left += settled
        self.alive = [each for each in self.alive if each not in settled]

    def _is_settled(self, candidate: K, leader: K) -> bool:
        costs, best = self.log_costs[candidate], self.log_costs[leader]
        ledger = self._ledgers.setdefault((candidate, leader), BettingLedger())
        for number in range(ledger.count, len(costs)):
            ledger.book(costs[number] - best[number] + self._tolerance)
        return ledger.is_enough(ledger.above, self._needed)

    def result(self) -> RaceResult[K]:
        best = self.leader
        places: dict[K, Place] = dict.fromkeys(self.alive, "undecided")
        places[best] = "best"
        for candidate in self._left:
            # By the best, which need not be the leader at which it left: the report tells both beside each other.
            behind_log = median(_differences(self.log_costs[candidate], self.log_costs[best]))
            places[candidate] = "ties" if behind_log <= self._tolerance else "slower"
        return RaceResult(best=best, places=places, log_costs=self.log_costs)
