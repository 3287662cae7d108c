"""How much each parameter of a grid decides: the exact functional ANOVA of the measured costs.

Source: Hooker, "Generalized functional ANOVA diagnostics for high dimensional functions of dependent variables", 2007,
for a full grid with equal weights. There every effect is a difference of means, and the shares add up to 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

Levels = tuple[object, ...]
"""One value for each factor."""

_MEDIAN_VARIANCE = math.pi / 2
"""The variance of a median of normal readings, relative to that of their mean."""
_MAD_TO_SIGMA = 1.4826


@dataclass(frozen=True, slots=True, kw_only=True)
class Impact:
    """The share of the variance of the log-costs that one factor, or the interaction of several, explains."""

    factors: tuple[str, ...]
    share: float

    @property
    def name(self) -> str:
        """``batch_size x graph``."""
        return " x ".join(self.factors)


def impacts(factors: Sequence[str], log_costs: Mapping[Levels, float]) -> list[Impact]:
    """The shares of all factors and interactions, the largest first. Empty where all costs are equal.

    ``log_costs`` holds every combination of the levels. Factors with one level are left out.
    """
    mean = fmean(log_costs.values())
    total = math.fsum((cost - mean) ** 2 for cost in log_costs.values())
    varied = [i for i in range(len(factors)) if len({levels[i] for levels in log_costs}) > 1]
    if total <= 0.0:
        return []
    effects: dict[tuple[int, ...], dict[Levels, float]] = {(): dict.fromkeys(log_costs, mean)}
    for size in range(1, len(varied) + 1):
        for subset in itertools.combinations(varied, size):
            effects[subset] = _effect(subset, log_costs, effects)
    found = [
        Impact(factors=tuple(factors[i] for i in subset), share=math.fsum(v * v for v in effect.values()) / total)
        for subset, effect in effects.items()
        if subset
    ]
    return sorted(found, key=lambda impact: -impact.share)


def _effect(
    subset: tuple[int, ...],
    log_costs: Mapping[Levels, float],
    effects: Mapping[tuple[int, ...], Mapping[Levels, float]],
) -> dict[Levels, float]:
    """The mean over all other factors, without the effects of the parts of the subset."""
    groups: dict[Levels, list[float]] = {}
    for levels, cost in log_costs.items():
        groups.setdefault(tuple(levels[i] for i in subset), []).append(cost)
    means = {key: fmean(costs) for key, costs in groups.items()}
    parts = [part for size in range(len(subset)) for part in itertools.combinations(subset, size)]
    return {
        levels: means[tuple(levels[i] for i in subset)] - math.fsum(effects[part][levels] for part in parts)
        for levels in log_costs
    }


def noise_share(readings: Mapping[Levels, Sequence[float]]) -> float:
    """The share of the variance between the cells that the error of their medians explains, from 0 to 1.

    ``readings`` are log-costs by cell. The error is estimated from their median absolute deviation.
    """
    centres = [median(each) for each in readings.values()]
    mean = fmean(centres)
    between = fmean((centre - mean) ** 2 for centre in centres)
    errors = []
    for centre, logs in zip(centres, readings.values(), strict=True):
        sigma = _MAD_TO_SIGMA * median(abs(log - centre) for log in logs)
        errors.append(_MEDIAN_VARIANCE * sigma * sigma / len(logs))
    return min(fmean(errors) / between, 1.0) if between > 0.0 else 1.0


def full_subgrid(cells: Sequence[Levels]) -> tuple[list[Levels], list[tuple[int, object]]]:
    """The cells of a complete grid, and the levels (factor, value) that were left out for it.

    While a combination is missing, the level with the largest part of its combinations missing is left out.
    """
    present, left_out = list(cells), []
    while present:
        axes = [list(dict.fromkeys(levels[i] for levels in present)) for i in range(len(present[0]))]
        missing = set(itertools.product(*axes)) - set(present)
        if not missing:
            break
        candidates = [(i, value) for i, axis in enumerate(axes) if len(axis) > 1 for value in axis]
        worst = max(candidates, key=lambda one: sum(each[one[0]] == one[1] for each in missing) * len(axes[one[0]]))
        present = [levels for levels in present if levels[worst[0]] != worst[1]]
        left_out.append(worst)
    return present, left_out
