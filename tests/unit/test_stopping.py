from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from pytest_cudagraph import protocols, stopping
from pytest_cudagraph.stopping import EvidenceRule, FixedTimeRule
from pytest_cudagraph.values import Block

TARGET = 1.15
LATE_NS = 1e9


def t3(rng: random.Random) -> float:
    return rng.gauss(0, 1) / math.sqrt(sum(rng.gauss(0, 1) ** 2 for _ in range(3)) / 3)


def cauchy(rng: random.Random) -> float:
    return math.tan(math.pi * (rng.random() - 0.5))


def two_mode(rng: random.Random) -> float:
    return rng.gauss(0, 0.3) + (4.0 if rng.random() < 0.3 else 0.0)


def run(true_ratio, noise, *, seed, blocks=700, block_ns=1.5e6, rule=None):
    """Blocks of both arms with the same kind of noise, straight into the rule."""
    rng = random.Random(seed)
    rule = rule or EvidenceRule(TARGET)
    for count in range(1, blocks + 1):
        rule.add(Block(eager_ns=1e5 * true_ratio * math.exp(noise(rng)), replay_ns=1e5 * math.exp(noise(rng))))
        if rule.is_finished(count * block_ns):
            break
    return rule.decision, count


def exact(ratio: float) -> Block:
    return Block(eager_ns=1e5 * ratio, replay_ns=1e5)


NOISES = {
    "t3": lambda rng: 0.01 * t3(rng),
    "cauchy": lambda rng: 0.004 * cauchy(rng),
    "two modes": lambda rng: 0.01 * two_mode(rng),
    "loud t3": lambda rng: 0.03 * t3(rng),
}


@pytest.mark.parametrize("noise", NOISES, ids=str)
def test_ten_percent_above_the_target_never_fails(noise):
    found = Counter(run(TARGET * 1.10, NOISES[noise], seed=seed, blocks=300)[0] for seed in range(60))
    assert found["fail"] == 0
    assert found["pass"] >= 58


@pytest.mark.parametrize("noise", NOISES, ids=str)
def test_ten_percent_below_the_target_never_passes(noise):
    found = Counter(run(TARGET * 0.90, NOISES[noise], seed=seed, blocks=300)[0] for seed in range(60))
    assert found["pass"] == 0
    assert found["fail"] >= 58


def test_exactly_at_the_target_hardly_ever_fails():
    found = Counter(run(TARGET, NOISES["t3"], seed=seed, blocks=300)[0] for seed in range(100))
    assert found["fail"] == 0


def test_at_the_tested_boundary_the_error_rates_are_the_stated_ones():
    def at_boundary(seed):
        return run(TARGET * 0.995, NOISES["t3"], seed=seed, blocks=150, rule=EvidenceRule(TARGET, min_time_ns=0))[0]

    found = Counter(at_boundary(seed) for seed in range(300))
    # Stated: at most 1 % and 0.1 %; the limits are three standard deviations of a count above that.
    assert found["pass"] <= 8
    assert found["fail"] <= 2


def test_drift_common_to_both_arms_does_not_move_the_verdict():
    rng = random.Random(4)
    rule = EvidenceRule(TARGET)
    for count in range(300):
        level = 1e5 * (1 + count / 100)
        noise = math.exp(0.01 * t3(rng))
        rule.add(Block(eager_ns=level * TARGET * 1.05 * noise, replay_ns=level))
        if rule.is_finished(count * 1.5e6):
            break
    assert rule.decision == "pass"


def test_a_burst_on_eager_alone_does_not_pass_while_the_quiet_state_says_no():
    rng = random.Random(9)
    guarded = EvidenceRule(TARGET, min_time_ns=0)
    for count in range(300):
        slow = 1.4 if count % 10 < 7 else 1.0  # eager is disturbed in seven of ten blocks
        guarded.add(Block(eager_ns=1e5 * 0.95 * TARGET * slow * math.exp(0.002 * t3(rng)), replay_ns=1e5))
        guarded.is_finished(LATE_NS)
    assert guarded.decision != "pass"

    rng = random.Random(9)
    unguarded = EvidenceRule(TARGET, min_time_ns=0, quiet_quantile=0.9)
    for count in range(300):
        slow = 1.4 if count % 10 < 7 else 1.0
        unguarded.add(Block(eager_ns=1e5 * 0.95 * TARGET * slow * math.exp(0.002 * t3(rng)), replay_ns=1e5))
        unguarded.is_finished(LATE_NS)
    assert unguarded.decision == "pass", "the scenario must be one that only the guard withstands"


@pytest.mark.parametrize(("blocks", "decision"), [(9, "open"), (10, "pass")])
def test_no_verdict_before_ten_blocks(blocks, decision):
    rule = EvidenceRule(TARGET)
    for _ in range(blocks):
        rule.add(exact(2.0))
    assert rule.is_finished(LATE_NS) is (decision != "open")
    assert rule.decision == decision


@pytest.mark.parametrize(("elapsed_ns", "finished"), [(0.2e9 - 1, False), (0.2e9, True)])
def test_no_verdict_before_the_minimum_time(elapsed_ns, finished):
    rule = EvidenceRule(TARGET)
    for _ in range(40):
        rule.add(exact(0.5))
    assert rule.is_finished(elapsed_ns) is finished


@pytest.mark.parametrize(
    ("ratio", "decision"),
    [(TARGET * 0.9951, "pass"), (TARGET * 0.9949, "fail"), (TARGET, "pass"), (TARGET * 0.99, "fail")],
)
def test_noiseless_verdicts_turn_at_the_target_less_its_tolerance(ratio, decision):
    rule = EvidenceRule(TARGET)
    for _ in range(20):
        rule.add(exact(ratio))
    assert rule.is_finished(LATE_NS)
    assert rule.decision == decision


def test_differences_of_nothing_stay_open():
    rule = EvidenceRule(2.0, tolerance=0.0)
    for _ in range(100):
        rule.add(exact(2.0))
    assert not rule.is_finished(LATE_NS)
    assert rule.decision == "open"


def test_failing_needs_more_evidence_than_passing():
    def blocks_until(ratio):
        rule = EvidenceRule(1.0, tolerance=0.0, min_blocks=1, min_time_ns=0)
        for count in range(1, 50):
            rule.add(exact(ratio))
            if rule.is_finished(LATE_NS):
                return count, rule.decision
        raise AssertionError

    assert blocks_until(1.1) == (9, "pass")
    assert blocks_until(1 / 1.1) == (13, "fail")


def test_a_decision_is_never_taken_back():
    rule = EvidenceRule(TARGET)
    for _ in range(20):
        rule.add(exact(2.0))
    assert rule.is_finished(LATE_NS)
    for _ in range(500):
        rule.add(exact(0.5))
    assert rule.is_finished(LATE_NS)
    assert rule.decision == "pass"


def test_one_block_never_weighs_more_than_another():
    mild, wild = EvidenceRule(1.0), EvidenceRule(1.0)
    for count in range(30):
        sign = 1 if count % 2 else -1
        mild.add(exact(math.exp(0.01 * sign)))
        wild.add(exact(math.exp(0.01 * sign)))
    mild.add(exact(math.exp(0.02)))
    wild.add(exact(1e6))
    assert mild._above == wild._above


def test_the_scale_looks_at_the_past_only():
    scorer = stopping.Scorer()
    assert [scorer.score(x) for x in (-0.5, 0.25, 100.0, -0.5)] == [-1.0, 0.5, 1.0, -0.5 / ((0.5 + 0.25 + 1.125) / 3)]


def test_scores_without_a_scale_are_signs():
    scorer = stopping.Scorer()
    assert [scorer.score(x) for x in (0.0, 0.0, -3.0, 1.5)] == [0.0, 0.0, -1.0, 1.0]


def test_evidence_of_the_rule_is_the_evidence_of_the_interval():
    rng = random.Random(2)
    rule = EvidenceRule(TARGET)
    differences = []
    for _ in range(50):
        block = Block(eager_ns=1.2e5 * math.exp(0.02 * t3(rng)), replay_ns=1e5)
        differences.append(math.log(block.eager_ns / block.replay_ns) - math.log(rule.boundary_ratio))
        rule.add(block)
    assert sum(rule._above) / 7 == pytest.approx(stopping.evidence(differences))
    assert sum(rule._below) / 7 == pytest.approx(stopping.evidence([-d for d in differences]))


def test_evidence_against_a_fair_coin_rarely_grows():
    ever = 0
    for seed in range(400):
        rng = random.Random(seed)
        differences = [cauchy(rng) for _ in range(100)]
        ever += any(stopping.evidence(differences[:count]) >= 20 for count in range(5, 101, 5))
    assert ever / 400 <= 0.05


def test_evidence_saturates_without_becoming_nan():
    assert stopping.evidence([1.0] * 3000) == math.inf
    assert stopping.evidence([-1.0] * 3000) == 0.0 or stopping.evidence([-1.0] * 3000) < 1e-50
    assert stopping.evidence([]) == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_ratio": 0.0}, "target_ratio must be a positive number, not 0.0"),
        ({"target_ratio": math.nan}, "target_ratio must be a positive number, not nan"),
        ({"target_ratio": math.inf}, "target_ratio must be a positive number, not inf"),
        ({"target_ratio": 1.1, "tolerance": 1.0}, "tolerance must be at least 0 and below 1, not 1.0"),
        ({"target_ratio": 1.1, "pass_alpha": 0.0}, "pass_alpha must lie between 0 and 1, not 0.0"),
        ({"target_ratio": 1.1, "fail_alpha": 1.0}, "fail_alpha must lie between 0 and 1, not 1.0"),
        ({"target_ratio": 1.1, "quiet_quantile": -0.1}, "quiet_quantile must be at least 0 and below 1, not -0.1"),
        ({"target_ratio": 1.1, "min_blocks": 0}, "min_blocks must be at least 1, not 0"),
    ],
)
def test_a_parameter_out_of_range_is_named(options, message):
    with pytest.raises(ValueError) as caught:
        EvidenceRule(**options)
    assert str(caught.value) == message


def test_what_is_asked_and_what_is_tested_are_both_told():
    rule = EvidenceRule(2.0)
    assert (rule.target_ratio, rule.boundary_ratio) == (2.0, 1.99)
    assert (FixedTimeRule().target_ratio, FixedTimeRule().boundary_ratio) == (None, None)


@pytest.mark.parametrize(
    ("blocks", "elapsed_ns", "finished"), [(9, 1e12, False), (10, 0.3e9 - 1, False), (10, 0.3e9, True)]
)
def test_fixed_time_wants_its_time_and_its_blocks_and_decides_nothing(blocks, elapsed_ns, finished):
    rule = FixedTimeRule()
    for _ in range(blocks):
        rule.add(exact(3.0))
    assert rule.is_finished(elapsed_ns) is finished
    assert rule.decision == "open"


def test_both_rules_are_stopping_rules():
    rules: list[protocols.StoppingRule] = [EvidenceRule(1.1), FixedTimeRule()]
    for rule in rules:
        rule.add(exact(1.2))
        assert rule.is_finished(0.0) is False
