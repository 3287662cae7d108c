"""The histogram of durations: its error, its size, and merging without loss."""

import random
import statistics

import numpy as np
import pytest

from pytest_cudagraph.serving.calls.histogram import DurationHistogram, from_counts


def filled(durations):
    histogram = DurationHistogram()
    for duration in durations:
        histogram.add(duration)
    return histogram


def drawn(count, seed=0):
    """Durations over nine decades, from nanoseconds to seconds."""
    rng = random.Random(seed)
    return [int(10 ** rng.uniform(0, 9)) for _ in range(count)]


@pytest.mark.parametrize("fraction", [0.001, 0.25, 0.5, 0.9, 0.99, 1.0])
def test_a_quantile_is_right_to_one_percent(fraction):
    durations = drawn(20_000)
    exact = np.quantile(durations, fraction, method="inverted_cdf")
    assert filled(durations).quantile_ns(fraction) == pytest.approx(exact, rel=0.008)


def test_count_mean_and_ends_are_exact():
    found = filled([7, 1_000_003, 5])
    assert (found.count, found.mean_ns, found.minimum_ns, found.maximum_ns) == (3, 1_000_015 / 3, 5, 1_000_003)


def test_merged_histograms_are_the_histogram_of_all():
    one, other, whole = filled(drawn(500, 1)), filled(drawn(500, 2)), filled(drawn(500, 1) + drawn(500, 2))
    one.merge(other)
    one.merge(DurationHistogram())
    for name in DurationHistogram.__slots__:
        assert getattr(one, name) == getattr(whole, name)


def test_an_hour_of_any_durations_needs_2500_buckets_at_most():
    rng = random.Random(0)
    assert len(filled(int(10 ** rng.uniform(0, 12.6)) for _ in range(200_000)).counts) <= 2_500


def test_without_durations_there_is_no_quantile():
    empty = DurationHistogram()
    assert (empty.count, empty.mean_ns, empty.quantile_ns(0.5), empty.below([1 << 20])) == (0, None, None, [0])


def test_counts_below_a_power_of_two_are_exact():
    assert filled([1023, 1024, 1025, 4096]).below([1024, 2048, 4097, 8192]) == [1, 3, 4, 4]


@pytest.mark.parametrize("counts", [{-1: 1}, {0: 0}, {1025: 1}])
def test_counts_that_no_histogram_has_are_refused(counts):
    with pytest.raises(ValueError, match="are no bucket"):
        from_counts(counts, 1, 1, 1, 1)


def test_the_standard_deviation_is_exact_also_of_long_calls_that_hardly_differ():
    durations = [10**12 + 7 * (number % 3) for number in range(1_000)]
    assert filled(durations).standard_deviation_ns == pytest.approx(statistics.stdev(durations), rel=1e-12)
    assert filled([5]).standard_deviation_ns is None
