"""A histogram of durations with a bounded size and a bounded error.

Each power of two is divided into 64 buckets of equal width. So the middle of a bucket is at most 0.8 % away from any
duration in it. From a nanosecond to an hour there are at most 2,500 buckets. Durations below 128 ns are exact.

Integers suffice, so a duration costs half a microsecond and two histograms are merged without loss. The libraries were
looked at: hdrhistogram needs setuptools at run time and 40 KB for each name, ddsketch can be saved only through
protobuf, and both are larger than what they would replace.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import accumulate

_BITS = 7
"""Significant bits of a bucket's bound: 2**6 buckets in each power of two."""


def bucket_of(nanoseconds: int) -> int:
    """The lower bound of the bucket of a duration, in ns."""
    shift = nanoseconds.bit_length() - _BITS
    return nanoseconds if shift <= 0 else nanoseconds >> shift << shift


def _width(lower_ns: int) -> int:
    return 1 << max(lower_ns.bit_length() - _BITS, 0)


class DurationHistogram:
    """Counts of durations in ns. ``counts`` maps the lower bound of a bucket to the number of durations in it."""

    __slots__ = ("counts", "maximum_ns", "minimum_ns", "squares_ns2", "total_ns")

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.total_ns = self.squares_ns2 = 0
        self.minimum_ns: int | None = None
        self.maximum_ns: int | None = None

    def add(self, nanoseconds: int) -> None:
        """Count one duration of 0 ns or more."""
        bucket = bucket_of(nanoseconds)
        counts = self.counts
        counts[bucket] = counts.get(bucket, 0) + 1
        self.total_ns += nanoseconds
        self.squares_ns2 += nanoseconds * nanoseconds
        if self.maximum_ns is None or nanoseconds > self.maximum_ns:
            self.maximum_ns = nanoseconds
        if self.minimum_ns is None or nanoseconds < self.minimum_ns:
            self.minimum_ns = nanoseconds

    def merge(self, other: DurationHistogram) -> None:
        """Add all durations of another histogram."""
        for bucket, count in other.counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + count
        self.total_ns += other.total_ns
        self.squares_ns2 += other.squares_ns2
        self.minimum_ns = min(_present(self.minimum_ns, other.minimum_ns), default=None)
        self.maximum_ns = max(_present(self.maximum_ns, other.maximum_ns), default=None)

    @property
    def count(self) -> int:
        """The number of durations."""
        return sum(self.counts.values())

    @property
    def mean_ns(self) -> float | None:
        """Exact. None without durations."""
        return self.total_ns / self.count if self.counts else None

    @property
    def standard_deviation_ns(self) -> float | None:
        """Of a sample, exact. None with fewer than two durations."""
        count = self.count
        if count < 2:
            return None
        # Whole numbers: floats would lose the difference of two large sums.
        return math.sqrt(max(count * self.squares_ns2 - self.total_ns**2, 0) / (count * (count - 1)))

    def quantile_ns(self, fraction: float) -> float | None:
        """The duration with ``fraction`` of all below it or equal, to 0.8 %. None without durations.

        It is the middle of the bucket of the duration with rank ``ceil(fraction * count)``.
        """
        rank = max(1, math.ceil(fraction * self.count))
        seen = 0
        for lower_ns in sorted(self.counts):
            seen += self.counts[lower_ns]
            if seen >= rank:
                middle = lower_ns + (_width(lower_ns) - 1) / 2
                return min(max(middle, self.minimum_ns or 0), self.maximum_ns or middle)
        return None

    def below(self, limits_ns: Iterable[int]) -> list[int]:
        """The number of durations below each limit. Exact for bounds of buckets: 64 in each power of two."""
        lowers = sorted(self.counts)
        seen = [0, *accumulate(self.counts[lower] for lower in lowers)]
        return [seen[bisect_left(lowers, limit)] for limit in limits_ns]


def from_counts(
    counts: Mapping[int, int], total_ns: int, squares_ns2: int, minimum_ns: int | None, maximum_ns: int | None
) -> DurationHistogram:
    """A histogram from saved counts. Raises :class:`ValueError` for what no histogram has."""
    for lower, count in counts.items():
        if lower < 0 or count < 1 or bucket_of(lower) != lower:
            raise ValueError(f"{count} durations from {lower} ns are no bucket")
    histogram = DurationHistogram()
    histogram.counts = dict(counts)
    histogram.total_ns, histogram.squares_ns2 = total_ns, squares_ns2
    histogram.minimum_ns, histogram.maximum_ns = minimum_ns, maximum_ns
    return histogram


def _present(*values: int | None) -> list[int]:
    return [each for each in values if each is not None]
