"""Numbers to numbers: order statistics, robust spread, and the interval that belongs to a verdict.

Pure Python on purpose: at the sizes used here it is fast enough, and importing a statistics library would cost more
time than a whole measurement (docs/statistics.md).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from pytest_cudagraph.values import Interval, Latency

Evidence = Callable[[Sequence[float]], float]
"""Evidence that differences centre above zero, as a wealth: 1 at the start, ``1 / alpha`` rejects at level alpha."""

Differences = Callable[[float], Sequence[float]]
"""The differences from a log-ratio that the test is made on."""

Rejected = Callable[[float], bool]
"""Whether the test rejects a value from above."""

_MAD_TO_SIGMA = 1.4826
"""1 / 0.6745: the median absolute deviation of a normal distribution, scaled to its standard deviation."""

_MDE_FACTOR = 1.3
"""Measured on simulated runs: 1.26-1.30 for normal noise, 1.28-1.44 for t3 (docs/statistics.md)."""

_INTERVAL_ALPHA = 0.025
"""Per side, so 95 % together."""

_WIDEST_STEP = 8.0
"""Of a log-ratio: a factor of some 3000. An end beyond it is no end."""

_BISECTIONS = 7
"""Places an end to 1/128 of its bracket, which is itself no wider than the interval."""

_FINEST_STEP = 1e-5
"""Of a log-ratio: 0.001 %, far below what timing can support."""


def quantile(values: Sequence[float], fraction: float) -> float:
    """The order statistic number ``floor((n - 1) * fraction)``, counted from 0: a value that did occur.

    The same definition gives a block's level (``fraction`` 0.25: the smallest of 4 samples, the 2nd of 8, the 8th of
    32). Raises :class:`ValueError` without values or for a fraction outside 0..1.
    """
    if not values:
        raise ValueError("a quantile needs at least one value")
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"a quantile's fraction lies within 0..1, not {fraction!r}")
    # The tiny addition keeps 0.29 * 100 from falling to 28.
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


def detectable_ratio(noise_ratio: float, blocks: int, fail_alpha: float = 0.001) -> float:
    """The smallest relative difference found in 80 of 100 runs of ``blocks`` blocks (MDE); infinite below two blocks.

    ``1.3 s sqrt(2 ln(7 / alpha) / n)``: the growth rate of the best of seven stakes (docs/statistics.md).
    """
    if blocks < 2:
        return math.inf
    return _MDE_FACTOR * noise_ratio * math.sqrt(2.0 * math.log(7.0 / fail_alpha) / blocks)


def speedup_interval(
    log_ratios: Sequence[float],
    evidence: Evidence,
    *,
    boundary_ratio: float | None = None,
    alpha: float = _INTERVAL_ALPHA,
    estimate_log: float | None = None,
    differences: Differences | None = None,
) -> Interval:
    """The median ratio, with the ratios that the sequential test does not reject at level ``alpha`` per side.

    ``evidence`` is the test that decided; ``differences`` gives what it is made on for a ratio, that of each of
    ``log_ratios`` unless told, ``estimate_log`` another estimate than their median. The estimate is always inside. Of
    ``boundary_ratio`` the interval says what the test says: where it is rejected, a passed measurement (its estimate
    not below the boundary) never shows a low end below it, a failed one never a high end above it, for verdicts at
    levels of ``alpha`` and stricter; where it is not, it is inside. Too few blocks reject nothing: the interval is then
    0..infinity. Raises :class:`ValueError` without blocks.
    """
    centre = median(log_ratios) if estimate_log is None else estimate_log
    boundary = math.log(boundary_ratio) if boundary_ratio is not None else None
    about = differences or (lambda value: [log - value for log in log_ratios])
    step = max(_FINEST_STEP, spread(log_ratios) / math.sqrt(len(log_ratios)))

    def from_above(value: float) -> bool:
        return evidence(about(value)) >= 1.0 / alpha

    def from_below(mirrored: float) -> bool:
        return evidence([-difference for difference in about(-mirrored)]) >= 1.0 / alpha

    low = _lower_end(from_above, centre, boundary, step)
    # Mirrored, the upper end is a lower end.
    high = -_lower_end(from_below, -centre, None if boundary is None else -boundary, step)
    return Interval(estimate=math.exp(centre), low=math.exp(low), high=math.exp(high))


def _lower_end(rejected: Rejected, centre: float, boundary: float | None, step: float) -> float:
    """The largest value found that the test rejects, at most ``centre``; minus infinity if none is."""
    proved, inside = -math.inf, centre
    if boundary is not None and boundary <= centre:
        if rejected(boundary):
            proved = boundary
        else:
            # Not rejected, it belongs to the interval, though some value between may be rejected.
            inside = boundary
    if inside == centre and rejected(centre):
        # Very skewed noise; the interval still reaches its estimate.
        return centre
    outside, inside = _bracket(rejected, inside, step)
    outside = max(outside, proved)
    if math.isinf(outside) or outside >= inside:
        return outside
    for _ in range(_BISECTIONS):
        middle = (outside + inside) / 2
        if rejected(middle):
            outside = middle
        else:
            inside = middle
    return outside


def _bracket(rejected: Rejected, start: float, step: float) -> tuple[float, float]:
    """A rejected value below ``start`` and one above it that is not, found by doubling the step."""
    inside = start
    while step <= _WIDEST_STEP:
        outside = inside - step
        if rejected(outside):
            return outside, inside
        inside, step = outside, step * 2
    return -math.inf, inside
