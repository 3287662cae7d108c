from __future__ import annotations

import math
import random

import numpy as np
import pytest
from scipy import stats as reference

from pytest_cudagraph import stats
from pytest_cudagraph.stats import summaries


def heavy_tailed(rng: random.Random, scale: float) -> float:
    """Student's t with three degrees of freedom."""
    return scale * rng.gauss(0, 1) / math.sqrt(sum(rng.gauss(0, 1) ** 2 for _ in range(3)) / 3)


@pytest.mark.parametrize(("samples", "rank"), [(2, 0), (4, 0), (8, 1), (28, 6), (32, 7)])
def test_lower_quartile_of_a_block_is_its_documented_order_statistic(samples, rank):
    values = [float(v) for v in range(samples)]
    random.Random(3).shuffle(values)
    assert summaries.quantile(values, 0.25) == rank == (samples - 1) // 4


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0])
def test_quantile_is_numpys_lower_order_statistic(fraction):
    rng = random.Random(7)
    for size in (1, 2, 5, 40, 101):
        values = [rng.expovariate(1.0) for _ in range(size)]
        assert summaries.quantile(values, fraction) == np.quantile(values, fraction, method="lower")


def test_quantile_is_not_a_victim_of_binary_fractions():
    assert 0.29 * 100 < 29
    assert summaries.quantile([float(v) for v in range(101)], 0.29) == 29.0


def test_a_quantile_is_always_a_value_that_occurred():
    values = [3.0, 1.0, 2.0]
    assert all(summaries.quantile(values, step / 20) in values for step in range(21))


@pytest.mark.parametrize("fraction", [-0.01, 1.01, math.nan])
def test_quantile_refuses_a_fraction_out_of_range(fraction):
    with pytest.raises(ValueError, match=r"fraction lies within 0\.\.1, not"):
        summaries.quantile([1.0], fraction)


@pytest.mark.parametrize(
    "function", [lambda v: summaries.quantile(v, 0.5), summaries.median, summaries.latency_summary]
)
def test_nothing_has_no_summary(function):
    with pytest.raises(ValueError, match="at least one"):
        function([])


def test_spread_is_the_scaled_mad_and_ignores_an_outlier():
    rng = random.Random(11)
    values = [rng.gauss(5, 2) for _ in range(501)]
    assert summaries.spread(values) == pytest.approx(reference.median_abs_deviation(values, scale="normal"), rel=1e-4)
    assert summaries.spread([1.0, 2.0, 3.0, 4.0, 5.0]) == summaries.spread([1.0, 2.0, 3.0, 4.0, 1e9]) == 1.4826
    assert summaries.spread([7.0]) == 0.0


def test_latency_summary_names_every_quantile():
    found = summaries.latency_summary([float(v) for v in range(101, 0, -1)])
    assert (found.samples, found.minimum_ns, found.q25_ns, found.median_ns, found.q75_ns, found.q90_ns) == (
        101, 1.0, 26.0, 51.0, 76.0, 91.0,
    )  # fmt: skip


def test_drift_compares_the_last_quarter_with_the_first():
    assert summaries.drift_ratio([100.0] * 10 + [150.0] * 20 + [120.0] * 10) == pytest.approx(1.2)
    assert summaries.drift_ratio([100.0] * 8) == 1.0


def test_drift_of_a_handful_of_blocks_is_not_told():
    assert summaries.drift_ratio([1.0, 5.0, 9.0, 13.0, 17.0, 20.0, 30.0]) == 1.0


def test_detectable_difference_is_the_documented_formula():
    assert summaries.detectable_ratio(0.01, 200) == 1.3 * 0.01 * math.sqrt(2 * math.log(7000) / 200)
    assert summaries.detectable_ratio(0.02, 200) == 2 * summaries.detectable_ratio(0.01, 200)
    assert summaries.detectable_ratio(0.0, 1) == math.inf


def test_detectable_difference_is_found_in_about_80_of_100_runs():
    blocks, noise = 120, 0.01
    size = summaries.detectable_ratio(noise, blocks)
    found = 0
    for seed in range(200):
        rng = random.Random(seed)
        below = [size - rng.gauss(0, noise) for _ in range(blocks)]
        # A rule may stop at any block, so a run finds the difference if the evidence ever sufficed.
        found += any(stats.evidence(below[:count]) >= 1000 for count in range(10, blocks + 1, 5))
    assert 0.70 <= found / 200 <= 0.92


def test_interval_covers_the_truth_at_least_95_of_100_times():
    missed = 0
    for seed in range(200):
        rng = random.Random(seed)
        logs = [math.log(1.3) + heavy_tailed(rng, 0.02) for _ in range(60)]
        found = summaries.speedup_interval(logs, stats.evidence)
        assert found.low <= found.estimate <= found.high
        missed += not found.low <= 1.3 <= found.high
    assert missed <= 10


def test_interval_is_about_as_wide_as_the_order_statistic_interval():
    rng = random.Random(5)
    logs = [math.log(1.3) + heavy_tailed(rng, 0.02) for _ in range(200)]
    found = summaries.speedup_interval(logs, stats.evidence)
    fixed = reference.quantile_test(logs, p=0.5).confidence_interval(0.95)
    ratio = (math.log(found.high) - math.log(found.low)) / (fixed.high - fixed.low)
    # What being valid at every moment costs; more would be a fault of the inversion.
    assert 1.0 < ratio < 2.5
    assert found.estimate == pytest.approx(math.exp(np.median(logs)))


def test_interval_ends_are_where_the_test_turns():
    rng = random.Random(6)
    logs = [rng.gauss(0.2, 0.01) for _ in range(80)]
    found = summaries.speedup_interval(logs, stats.evidence)
    low, high = math.log(found.low), math.log(found.high)
    assert stats.evidence([log - low for log in logs]) >= 40
    assert stats.evidence([log - low - 1e-4 for log in logs]) < 40
    assert stats.evidence([high - log for log in logs]) >= 40
    assert stats.evidence([high - 1e-4 - log for log in logs]) < 40


def test_interval_mirrors_when_the_arms_change_places():
    rng = random.Random(8)
    logs = [rng.gauss(0.1, 0.02) for _ in range(50)]
    found = summaries.speedup_interval(logs, stats.evidence)
    mirrored = summaries.speedup_interval([-log for log in logs], stats.evidence)
    assert (mirrored.low, mirrored.high) == pytest.approx((1 / found.high, 1 / found.low))


def test_rejected_boundary_is_never_inside_the_interval():
    for seed in range(60):
        rng = random.Random(seed)
        logs = [heavy_tailed(rng, 0.02) + rng.choice([0.0, 0.3]) * (seed % 3 == 0) for _ in range(20 + seed)]
        for boundary in (0.97, 0.99, 1.0, 1.01, 1.03):
            found = summaries.speedup_interval(logs, stats.evidence, boundary_ratio=boundary)
            centred = [log - math.log(boundary) for log in logs]
            assert found.low <= found.estimate <= found.high
            if found.estimate >= boundary and stats.evidence(centred) >= 40:
                assert found.low >= boundary * (1 - 1e-12)
            if found.estimate <= boundary and stats.evidence([-x for x in centred]) >= 40:
                assert found.high <= boundary * (1 + 1e-12)


def test_rejected_boundary_holds_where_bisection_is_coarser():
    def turns_at_one_percent(differences):
        return 100.0 if summaries.median(differences) >= 0.01 else 1.0

    found = summaries.speedup_interval([0.0] * 20, turns_at_one_percent, boundary_ratio=math.exp(-0.010000001))
    assert math.exp(-0.010000001) * (1 - 1e-12) <= found.low < found.estimate
    found = summaries.speedup_interval([0.0] * 20, turns_at_one_percent, boundary_ratio=math.exp(0.010000001))
    assert found.estimate < found.high <= math.exp(0.010000001) * (1 + 1e-12)


@pytest.mark.parametrize("boundary_ratio", [None, 0.9, 1.05])
def test_the_estimate_is_in_its_interval_where_noise_is_very_skewed(boundary_ratio):
    def looks_at_the_largest(differences):
        return 100.0 if max(differences) > 0.2 else 1.0

    skewed = summaries.speedup_interval([0.0] * 15 + [0.3] * 5, looks_at_the_largest, boundary_ratio=boundary_ratio)
    assert (skewed.low, skewed.estimate) == (1.0, 1.0)
    assert skewed.high >= 1.0


def test_a_boundary_that_is_not_rejected_is_in_the_interval():
    def rejects_only_within_a_band(differences):
        return 100.0 if 0.05 <= summaries.median(differences) <= 0.2 else 1.0

    logs = [0.0] * 20
    assert summaries.speedup_interval(logs, rejects_only_within_a_band).low > math.exp(-0.06)
    told = summaries.speedup_interval(logs, rejects_only_within_a_band, boundary_ratio=math.exp(-0.3))
    assert told.low <= math.exp(-0.3) * (1 + 1e-12)
    told = summaries.speedup_interval(logs, rejects_only_within_a_band, boundary_ratio=math.exp(0.3))
    assert told.high >= math.exp(0.3) * (1 - 1e-12)


def test_the_interval_is_made_on_the_differences_it_is_given():
    logs = [0.2] * 20

    def with_as_many_on_the_other_side(value):
        return [log - value for log in logs] + [value - log for log in logs]

    found = summaries.speedup_interval(
        logs, stats.evidence, estimate_log=0.21, differences=with_as_many_on_the_other_side
    )
    assert (found.low, found.high) == (0.0, math.inf)
    assert found.estimate == pytest.approx(math.exp(0.21))


@pytest.mark.parametrize("blocks", [1, 7])
def test_too_few_blocks_bound_nothing(blocks):
    found = summaries.speedup_interval([0.5] * blocks, stats.evidence, boundary_ratio=1.1)
    assert (found.low, found.high) == (0.0, math.inf)
    assert found.estimate == pytest.approx(math.exp(0.5))


def test_without_noise_the_interval_closes_on_the_estimate():
    found = summaries.speedup_interval([0.2] * 10, stats.evidence)
    assert found.low == pytest.approx(math.exp(0.2), rel=2e-5)
    assert found.high == pytest.approx(math.exp(0.2), rel=2e-5)


def test_interval_needs_a_block():
    with pytest.raises(ValueError, match="at least one"):
        summaries.speedup_interval([], stats.evidence)
