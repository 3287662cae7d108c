"""Prompt lookup gives greedy's tokens in fewer steps, and what is rejected leaves nothing behind."""

from __future__ import annotations

import pytest
import torch
from examples.small_decoder import SmallDecoder
from tests.decoding_faults import Counts
from tests.facts import lookup

from pytest_cudagraph.check.compare import Tolerance
from pytest_cudagraph.decoding.agreement import compare_logits
from pytest_cudagraph.decoding.engine import DecodeEngine
from pytest_cudagraph.decoding.lookup import LookupRequest, LookupRun, judge_lookup, propose
from pytest_cudagraph.decoding.results import TokenAgreement
from pytest_cudagraph.errors import InputError

REQUEST = LookupRequest(k=3, ngram=(2, 4), min_tokens_per_step=None)
TOLERANCE = Tolerance(atol=1e-4)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2]),  # the longest suffix that was there before
        ([1, 2, 7, 1, 2, 8, 1, 2], [8, 1, 2]),  # its last occurrence
        ([5, 5, 5], [5]),
        ([1, 2, 3, 4], []),
        ([1, 2, 1], []),  # one token is shorter than the shortest suffix
        ([1], []),
    ],
)
def test_a_proposal_follows_the_last_earlier_occurrence_of_the_longest_suffix(tokens, expected):
    assert propose(tokens, REQUEST) == expected


def run(prompts, count, *, k=3, decoder=None):
    torch.manual_seed(0)
    decoder = decoder or SmallDecoder().eval()
    rows = prompts.shape[0]
    with DecodeEngine(decoder, [rows]) as engine, torch.inference_mode():
        engine.capture(rows, k + 1)
        eager = engine.generate(prompts, count, graphs=False, keep_logits=True)
        request = LookupRequest(k=k, ngram=(1, 4), min_tokens_per_step=None)
        found = LookupRun(engine=engine, request=request, prompts=prompts, expected=eager.tokens, rows=rows)
        return found, compare_logits(eager, generated := found.run(), TOLERANCE), generated


def repetitive(rows, length):
    return torch.arange(4).repeat(rows, length // 4) + torch.arange(rows)[:, None]


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("rows", [1, 3])
def test_every_token_is_greedys_and_every_call_a_replay(rows, k):
    found, tokens, generated = run(repetitive(rows, 12), 24, k=k)
    assert isinstance(tokens, TokenAgreement)
    assert generated.tokens.shape == (rows, 24)
    assert generated.receipt.replays == generated.receipt.steps == len(found.calls)
    assert any(call.drafted for call in found.calls)


def test_accepted_tokens_save_calls():
    found, tokens, _ = run(repetitive(1, 12), 25, decoder=Counts().eval())
    assert isinstance(tokens, TokenAgreement)
    assert len(found.calls) == 24 // 4
    assert {(call.drafted, call.accepted) for call in found.calls} == {(3, 3)}


def test_at_the_end_of_the_cache_steps_take_one_token_again():
    found, tokens, generated = run(repetitive(1, 48), 17)
    assert isinstance(tokens, TokenAgreement)
    assert found.calls[-1].drafted == 0
    assert generated.receipt.replays == len(found.calls)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"k": 0}, "k is a number of proposed tokens of at least 1; found 0"),
        ({"ngram": (4, 2)}, r"ngram is the shortest and the longest suffix, such as \(2, 4\); found \(4, 2\)"),
        ({"ngram": 3}, "ngram is the shortest and the longest suffix"),
        ({"min_tokens_per_step": 0.5}, "min_tokens_per_step is a number of at least 1; found 0.5"),
    ],
)
def test_a_request_that_makes_no_sense_is_one_clear_error(wrong, message):
    with pytest.raises(InputError, match=message):
        LookupRequest(**{"k": 3, "ngram": (2, 4), "min_tokens_per_step": None} | wrong)


def test_the_figures_count_as_vllm_does():
    found = lookup()
    assert (found.acceptance_ratio, found.mean_acceptance_length) == (18 / 30, 1 + 18 / (2 * 6))
    assert found.tokens_per_step == 19 / 10


def test_the_messages_of_the_gate(golden):
    judgements = [judge_lookup(lookup(), least) for least in (None, 1.5, 2.5)]
    lines = [
        "\n  ".join([f"{each.verdict.value}: {each.reason}", *each.evidence, *([each.remedy] if each.remedy else [])])
        for each in judgements
    ]
    golden("gate_lookup.txt", "\n".join(lines))
