"""What each cell must keep to, and when so few trials show that it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.error_rates.cells import Cell, Tally
from scipy.stats import binomtest

from pytest_cudagraph.values import Verdict

FULL_TRIALS = 2000
"""From here on a cell's own share counts; below, only what chance cannot explain."""

CONFIDENCE = 0.99

DECISION_LIMIT_NS = 5e3
"""Per block, of the stopping rule."""

_SHORT = ("20us", "200us")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A share of a cell's trials that may be at most so large."""

    what: str
    most: float
    applies: Callable[[Cell], bool]
    count: Callable[[Tally], int]

    def is_broken(self, tally: Tally) -> bool:
        """Whether the share is too large: itself with many trials, its exact lower bound with few."""
        count = self.count(tally)
        if tally.trials >= FULL_TRIALS:
            return count / tally.trials > self.most
        return lower_bound(count, tally.trials) > self.most

    def text(self, tally: Tally) -> str:
        count = self.count(tally)
        found = (
            f"{count} of {tally.trials} ({count / tally.trials:.1%}, at least {lower_bound(count, tally.trials):.2%})"
        )
        return f"{self.what}: {found}; allowed {self.most:.1%}"


def lower_bound(count: int, trials: int) -> float:
    """The exact (Clopper-Pearson) one-sided lower bound of a share at 99 % confidence."""
    return float(binomtest(count, trials, alternative="greater").proportion_ci(CONFIDENCE).low)


def _verdict(verdict: Verdict) -> Callable[[Tally], int]:
    return lambda tally: tally.verdicts[verdict]


def _later_than(time_ms: int) -> Callable[[Tally], int]:
    return lambda tally: sum(count for spent_ms, count in tally.spent_ms.items() if spent_ms > time_ms)


def _within_five(cell: Cell) -> bool:
    kind = cell.scenario.kind
    return cell.relative in (1.05, 0.95) and not (kind is not None and kind.starves)


LIMITS = (
    Limit(
        what="false failures",
        most=0.001,
        applies=lambda cell: cell.relative >= 1.02,
        count=_verdict(Verdict.FAILED),
    ),
    Limit(
        what="false failures at the threshold",
        most=0.01,
        applies=lambda cell: cell.relative in (1.01, 1.00),
        count=_verdict(Verdict.FAILED),
    ),
    Limit(
        what="passes below the threshold",
        most=0.01,
        applies=lambda cell: cell.relative <= 0.98,
        count=_verdict(Verdict.PASSED),
    ),
    Limit(
        what="inconclusive",
        most=0.02,
        applies=lambda cell: _within_five(cell) and cell.scenario.length in _SHORT,
        count=_verdict(Verdict.INCONCLUSIVE),
    ),
    Limit(
        what="inconclusive",
        most=0.05,  # asked of oversubscribed machines, kept to by all
        applies=lambda cell: _within_five(cell) and cell.scenario.length == "2ms",
        count=_verdict(Verdict.INCONCLUSIVE),
    ),
    Limit(
        what="median time to the verdict above 0.3 s, in trials",
        most=0.5,
        applies=lambda cell: _within_five(cell) and cell.scenario.length in _SHORT,
        count=_later_than(300),
    ),
    Limit(
        what="median time to the verdict above 0.6 s, in trials",
        most=0.5,
        applies=lambda cell: _within_five(cell) and cell.scenario.length == "2ms",
        count=_later_than(600),
    ),
)


def _has_a_truth(cell: Cell) -> bool:
    margin_ratio = cell.scenario.truth_margin_ratio
    return margin_ratio == 0 or abs(cell.relative - 1) > margin_ratio + 1e-9


def broken_limits(cells: Sequence[Cell], tallies: Mapping[str, Tally]) -> Iterator[str]:
    """What breaks its limit: cells, then groups of cells with one true speedup.

    A group whose common share is too large holds a cell whose share is: with few trials that shows sooner.
    """
    for limit in LIMITS:
        pooled: dict[tuple[str, float], Tally] = {}
        for cell in filter(limit.applies, filter(_has_a_truth, cells)):
            group, tally = cell.scenario.group, tallies[cell.name]
            pooled.setdefault((group, cell.relative), Tally()).merge(tally)
            if limit.is_broken(tally):
                yield f"{cell.name}: {limit.text(tally)}"
        for (group, relative), tally in pooled.items():
            if limit.is_broken(tally):
                yield f"{group}, all at {relative:.2f}: {limit.text(tally)}"
