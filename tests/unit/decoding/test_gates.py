"""The gates of tokens and steps: what counts as a tie, what as a difference, and how they say it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pytest_cudagraph.check.compare import Tolerance
from pytest_cudagraph.decoding.agreement import compare_logits, judge_steps, judge_tokens
from pytest_cudagraph.decoding.engine import Generated
from pytest_cudagraph.decoding.results import GenerationReceipt, NotFiniteLogits, TokenAgreement, TokenDifference

STEPS = GenerationReceipt(steps=3, replays=3)


def generated(logits):
    logits = torch.tensor(logits, dtype=torch.float32)
    return Generated(tokens=logits.argmax(-1), logits=logits, receipt=STEPS)


def test_a_token_may_differ_where_eagers_two_largest_logits_are_within_twice_the_tolerance():
    eager, found = generated([[[5.0, 4.999, 0.0]]]), generated([[[4.9992, 5.0001, 0.0]]])
    agreement = compare_logits(eager, found, Tolerance(rtol=0.0, atol=0.0012))
    assert isinstance(agreement, TokenAgreement)
    assert (agreement.ties, agreement.compared) == (1, 1)
    assert not judge_tokens(agreement, exact=False).verdict.fails
    assert judge_tokens(agreement, exact=True).verdict.fails
    assert isinstance(compare_logits(eager, found, Tolerance(rtol=0.0, atol=0.001)), TokenDifference)


def test_a_token_that_is_not_among_the_largest_logits_is_no_tie():
    eager = generated([[[5.0, 4.0, 0.0]]])
    found = replace(eager, tokens=torch.tensor([[1]]))
    assert isinstance(compare_logits(eager, found, Tolerance()), TokenDifference)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 5.2])
def test_a_logit_beyond_the_tolerance_is_a_difference_also_where_the_token_is_the_same(value):
    eager, found = generated([[[5.0, 1.0], [5.0, 1.0]]]), generated([[[5.0, 1.0], [value, 1.0]]])
    difference = compare_logits(eager, found, Tolerance())
    assert isinstance(difference, TokenDifference)
    assert (difference.row, difference.position) == (0, 1)


def test_the_tolerance_grows_with_the_largest_logit_of_the_place_and_not_with_the_logit_itself():
    eager, found = generated([[[1000.0, 0.001]]]), generated([[[1000.0, 0.002]]])
    assert isinstance(compare_logits(eager, found, Tolerance()), TokenAgreement)
    small = generated([[[1.0, 0.001]]]), generated([[[1.0, 0.002]]])
    assert isinstance(compare_logits(*small, Tolerance()), TokenDifference)


@pytest.mark.parametrize("ruled_out", [float("-inf"), torch.finfo(torch.float32).min, -1e9])
def test_a_token_that_the_model_rules_out_allows_no_other_logit_to_differ(ruled_out):
    eager = generated([[[5.0, 1.0, 2.0, ruled_out]]])
    for found, kind in (([5.0, 1.0, 2.0], TokenAgreement), ([5.0, 9.0, 2.0], TokenDifference)):
        assert isinstance(compare_logits(eager, generated([[[*found, ruled_out]]]), Tolerance()), kind)
    assert isinstance(compare_logits(eager, generated([[[5.0, 1.0, 2.0, 3.0]]]), Tolerance()), TokenDifference)


@pytest.mark.parametrize(
    ("dtype", "within", "beyond"),
    [(torch.float32, 0.003, 0.004), (torch.bfloat16, 0.125, 0.25), (torch.float16, 0.125, 0.25)],
)
def test_the_rounding_of_all_layers_is_allowed_and_half_of_the_digits_is_not(dtype, within, beyond):
    """A padded batch of a small decoder differed by 2.15e-05 in float32, where assert_close allows 1.72e-05."""
    eager = generated([[[10.0, 1.0]]])
    for difference, kind in ((within, TokenAgreement), (beyond, TokenDifference)):
        found = generated([[[10.0 + difference, 1.0]]])
        both = [replace(each, logits=each.logits.to(dtype)) for each in (eager, found)]
        assert isinstance(compare_logits(*both, Tolerance()), kind)
    assert isinstance(compare_logits(*both, Tolerance(rtol=0.1)), TokenAgreement)


def test_the_messages_of_the_gates(golden):
    difference = TokenDifference(
        row=3, position=7, expected=24, found=56, differing=62, compared=64, gap=1.17, same_shapes=True
    )
    logits = TokenDifference(
        row=0, position=2, expected=24, found=24, differing=0, compared=64, gap=0.2, same_shapes=False,
        largest_difference=0.47, tolerance=2.3e-5,
    )  # fmt: skip
    tie = TokenAgreement(compared=64, same_shapes=False, ties=2, largest_difference=1e-5, tolerance=2.3e-5)
    judgements = [
        judge_steps(STEPS),
        judge_steps(GenerationReceipt(steps=23, replays=23, padded_rows=1)),
        judge_steps(GenerationReceipt(steps=23, replays=0, eager={"batch 3 is beyond the largest graph (2)": 23})),
        judge_tokens(TokenAgreement(compared=64, same_shapes=True), exact=True),
        judge_tokens(tie, exact=False),
        judge_tokens(tie, exact=True),
        judge_tokens(difference, exact=False),
        judge_tokens(NotFiniteLogits(row=1, position=9, largest=float("nan")), exact=False),
        judge_tokens(logits, exact=False),
    ]
    lines = [
        "\n  ".join([f"{each.verdict.value}: {each.reason}", *each.evidence, *([each.remedy] if each.remedy else [])])
        for each in judgements
    ]
    golden("gate_generation.txt", "\n".join(lines))
