"""Order statistics, robust spread, and the interval that agrees with a verdict.

Pure Python, because to import a statistics library would take longer than a measurement (docs/statistics.md).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Literal

from pytest_cudagraph.values import Interval, Latency

Evidence = Callable[[Sequence[float]], float]
"""Evidence that differences are above zero, as a wealth that starts with 1. ``1 / alpha`` rejects at level alpha."""

Differences = Callable[[float], Sequence[float]]
"""The differences from a log-ratio that the test uses."""

Side = Literal[-1, 1]
"""Below the estimate, or above it."""

Rejects = Callable[[float, Side], bool]
"""Whether the test rejects a log-ratio on this side."""

_MAD_TO_SIGMA = 1.4826
"""1 / 0.6745: scales the median absolute deviation of a normal distribution to its standard deviation."""

_MDE_FACTOR = 1.3
"""Measured on simulated runs: 1.26-1.30 for normal noise, 1.28-1.44 for t3 (docs/statistics.md)."""

_FAIL_ALPHA = 0.001
"""That of a failure in :class:`~pytest_cudagraph.stats.EvidenceRule`."""

_INTERVAL_ALPHA = 0.025
"""Per side, so that the interval has 95 %."""

_WIDEST_STEP = 8.0
"""In log-ratios: a factor of about 3000. Beyond it, a side has no end."""

_BISECTIONS = 7
"""Finds an end to 1/128 of its bracket, which is not wider than the interval."""

_FINEST_STEP = 1e-5
"""In log-ratios: 0.001 %, far below the resolution of timing."""


def quantile(values: Sequence[float], fraction: float) -> float:
    """The order statistic number ``floor((n - 1) * fraction)``, counted from 0, without interpolation.

    With ``fraction`` 0.25 it is a block's level: the smallest of 4 samples, the 2nd of 8, the 8th of 32. Raises
    :class:`ValueError` without values or for a fraction outside 0..1.
    """
    if not values:
        raise ValueError("a quantile needs at least one value")
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"a quantile's fraction lies within 0..1, not {fraction!r}")
    # The small addition corrects rounding: 0.29 * 100 must not become 28.
    return sorted(values)[math.floor((len(values) - 1) * fraction + 1e-9)]


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two middle ones. Raises :class:`ValueError` without values."""
    if not values:
        raise ValueError("a median needs at least one value")
    return statistics.median(values)


def spread(values: Sequence[float]) -> float:
    """The robust standard deviation 1.4826 MAD; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    centre = median(values)
    return _MAD_TO_SIGMA * median([abs(value - centre) for value in values])


def latency_summary(samples_ns: Sequence[float]) -> Latency:
    """The distribution of one arm's samples. Raises :class:`ValueError` without samples."""
    if not samples_ns:
        raise ValueError("a latency summary needs at least one sample")
    ordered = sorted(samples_ns)
    return Latency(
        samples=len(ordered),
        minimum_ns=ordered[0],
        q25_ns=quantile(ordered, 0.25),
        median_ns=median(ordered),
        q75_ns=quantile(ordered, 0.75),
        q90_ns=quantile(ordered, 0.90),
    )


def drift_ratio(levels_ns: Sequence[float]) -> float:
    """The median level of the last quarter over that of the first quarter; 1 for fewer than eight levels."""
    quarter = len(levels_ns) // 4
    if quarter < 2:
        return 1.0
    return median(levels_ns[-quarter:]) / median(levels_ns[:quarter])


def detectable_ratio(noise_ratio: float, blocks: int) -> float:
    """The smallest relative difference that 80 of 100 runs of ``blocks`` blocks detect; infinite below two blocks.

    ``1.3 s sqrt(2 ln(7 / alpha) / n)``, from the growth rate of the best of seven stakes (docs/statistics.md).
    """
    if blocks < 2:
        return math.inf
    return _MDE_FACTOR * noise_ratio * math.sqrt(2.0 * math.log(7.0 / _FAIL_ALPHA) / blocks)


def speedup_interval(
    log_ratios: Sequence[float],
    evidence: Evidence,
    *,
    boundary_ratio: float | None = None,
    estimate_log: float | None = None,
    differences: Differences | None = None,
) -> Interval:
    """The median ratio, with the ratios that the sequential test does not reject at 2.5 % per side.

    ``evidence`` is the test that decided. ``differences`` gives its input for a log-ratio, by default the difference of
    each of ``log_ratios``. ``estimate_log`` replaces the median of ``log_ratios``. The estimate is always inside.

    At ``boundary_ratio`` the interval agrees with the test. A rejected boundary is outside. So a passed measurement has
    no low end below the boundary, and a failed one no high end above it, for verdicts at 2.5 % and stricter.
    A boundary that is not rejected is inside. Too few blocks reject nothing, and give 0..infinity. Raises
    :class:`ValueError` without blocks.
    """
    centre = median(log_ratios) if estimate_log is None else estimate_log
    boundary = math.log(boundary_ratio) if boundary_ratio is not None else None
    about = differences or (lambda value: [log - value for log in log_ratios])
    step = max(_FINEST_STEP, spread(log_ratios) / math.sqrt(len(log_ratios)))

    def rejects(value: float, side: Side) -> bool:
        return evidence([-side * difference for difference in about(value)]) >= 1.0 / _INTERVAL_ALPHA

    low, high = _end(rejects, -1, centre, boundary, step), _end(rejects, 1, centre, boundary, step)
    return Interval(estimate=math.exp(centre), low=math.exp(low), high=math.exp(high))


def _end(rejects: Rejects, side: Side, centre: float, boundary: float | None, step: float) -> float:
    """The rejected log-ratio nearest to ``centre`` that was found on one side; infinite if there is none."""
    proved, inside = side * math.inf, centre
    if boundary is not None and side * (boundary - centre) >= 0:
        if rejects(boundary, side):
            proved = boundary
        else:
            # It belongs to the interval, even if a value nearer to the centre is rejected.
            inside = boundary
    if inside == centre and rejects(centre, side):
        # The noise is very skewed; the interval still contains its estimate.
        return centre
    outside, inside = _bracket(rejects, side, inside, step)
    outside = max(outside, proved) if side < 0 else min(outside, proved)
    if math.isinf(outside) or side * (outside - inside) <= 0:
        return outside
    for _ in range(_BISECTIONS):
        middle = (outside + inside) / 2
        if rejects(middle, side):
            outside = middle
        else:
            inside = middle
    return outside


def _bracket(rejects: Rejects, side: Side, start: float, step: float) -> tuple[float, float]:
    """A rejected value beyond ``start``, and the last one before it that is not; the step doubles each time."""
    inside = start
    while step <= _WIDEST_STEP:
        outside = inside + side * step
        if rejects(outside, side):
            return outside, inside
        inside, step = outside, step * 2
    return side * math.inf, inside
