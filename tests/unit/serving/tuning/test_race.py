"""The race finds the best, says what it knows, and ends."""

import math
import random
from statistics import median

import pytest

from pytest_cudagraph.serving.tuning.race import is_above, race

TRUTH = {"fast": 1.00, "near": 1.005, "slow": 1.30, "slowest": 3.0}


def sampler(truth, noise, seed=0):
    rng = random.Random(seed)
    return lambda name: truth[name] * math.exp(rng.gauss(0.0, noise))


def after(most):
    return lambda rounds: rounds >= most


@pytest.mark.parametrize("seed", range(5))
def test_slower_candidates_leave_and_one_within_the_tolerance_ties(seed):
    found = race(list(TRUTH), sampler(TRUTH, 0.01, seed), is_over=after(1_000), seed=seed)
    winner, other = ("fast", "near") if found.best == "fast" else ("near", "fast")
    assert found.places == {winner: "best", other: "ties", "slow": "slower", "slowest": "slower"}
    assert len(found.log_costs["slowest"]) < 100


def test_what_the_time_does_not_decide_is_undecided():
    found = race(list(TRUTH), sampler(TRUTH, 0.5), is_over=after(10), seed=0)
    assert [place for place in found.places.values() if place != "best"] == ["undecided"] * 3
    assert found.samples == 40


def test_one_candidate_is_the_best_after_ten_rounds():
    found = race(["fast"], sampler(TRUTH, 0.1), is_over=after(1_000), seed=0)
    assert (found.best, found.places, found.samples) == ("fast", {"fast": "best"}, 10)


def test_nobody_leaves_before_the_least_time():
    sampled, sample = [], sampler(TRUTH, 0.01)

    def counted(name):
        sampled.append(name)
        return sample(name)

    found = race(
        ["fast", "slowest"], counted, is_over=after(10_000), may_settle=lambda: len(sampled) >= 300, seed=0
    )  # fmt: skip
    assert found.places["slowest"] == "slower"
    assert 150 <= len(found.log_costs["slowest"]) < 170


def test_equal_candidates_hardly_ever_lose_one_another():
    """The level of the test: with all costs equal and no tolerance, a candidate that leaves is a false claim."""
    equal = dict.fromkeys("abcd", 1.0)
    races = [
        race(list(equal), sampler(equal, 0.1, seed), is_over=after(60), tolerance=0.0, seed=seed) for seed in range(100)
    ]
    assert sum(set(found.places.values()) != {"best", "undecided"} for found in races) <= 5


def test_rounds_that_do_not_count_decide_nothing():
    """Every second round is disturbed: there the slowest is the fastest."""
    calm, rounds = sampler(TRUTH, 0.01), []

    def sample(name):
        return calm(name) if len(rounds) % 2 == 0 else 1.0 / calm(name)

    def counts(pending):
        rounds.append(pending)
        return len(rounds) % 2 == 1

    found = race(["near", "slow"], sample, counts=counts, is_over=after(1_000), seed=0)
    assert found.places == {"near": "best", "slow": "slower"}
    assert max(found.log_costs["near"]) < 0.1


def test_later_answers_are_about_all_rounds_since_the_last():
    asked = []

    def counts(pending):
        asked.append(pending)
        return None if pending < 3 else len(asked) > 3

    found = race(["fast"], sampler(TRUTH, 0.01), counts=counts, is_over=after(1_000), seed=0)
    assert asked[:6] == [1, 2, 3, 1, 2, 3]
    assert found.samples == len(asked) - 3


def test_without_a_round_that_counts_there_is_no_result():
    over = iter([False, False, True])
    assert race(["fast"], sampler(TRUTH, 0.1), counts=lambda p: False, is_over=lambda r: next(over), seed=0) is None


def test_the_cost_of_one_that_left_in_a_slow_phase_is_that_of_the_rounds_it_shared_with_the_best():
    rounds = {"a": 0, "b": 0}

    def sample(candidate):
        rounds[candidate] += 1
        return (2.0 if rounds[candidate] <= 40 else 1.0) * (1.0 if candidate == "a" else 1.2)

    result = race(["a", "b"], sample, may_settle=lambda: rounds["a"] > 200 or rounds["b"] > 20,
                  is_over=lambda count: count >= 300, seed=0)  # fmt: skip
    assert (result.best, len(result.log_costs["b"]) < 40) == ("a", True)
    assert result.behind_logs("b") == pytest.approx([math.log(1.2)] * len(result.behind_logs("b")))
    assert set(result.behind_logs("a")) == {0.0}


def test_what_ties_is_within_the_tolerance_of_the_best_that_the_report_shows():
    """Also where the leader at which it left is not the best of the end."""
    for seed in range(60):
        truth = dict.fromkeys("abcd", 1.0)
        result = race(list(truth), sampler(truth, 0.08, seed), is_over=after(400), tolerance=0.02, seed=seed)
        for name, place in result.places.items():
            behind_log = median(result.behind_logs(name))
            assert place != "ties" or behind_log <= 0.02, (seed, name)
            assert place != "slower" or behind_log > 0.02, (seed, name)


def test_evidence_above_a_limit_needs_more_than_a_median_above_it():
    rng = random.Random(3)
    assert not is_above([rng.gauss(0.05, 0.3) for _ in range(20)], 0.03, alpha=0.05)
    assert not is_above([rng.gauss(0.0, 0.3) for _ in range(2_000)], 0.03, alpha=0.05)
    assert is_above([rng.gauss(0.30, 0.3) for _ in range(200)], 0.03, alpha=0.05)
