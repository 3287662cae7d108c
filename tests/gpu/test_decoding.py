"""Decode steps as CUDA graphs: eager's tokens, a replay on every step, several widths over one cache."""

from __future__ import annotations

import pytest
import torch
from examples.small_decoder import SmallDecoder
from tests.decoding_faults import FAULTS, TOLERANCE

from pytest_cudagraph import DecodeEngine
from pytest_cudagraph.decoding.agreement import compare_logits, compare_with_eager, judge_steps, judge_tokens
from pytest_cudagraph.decoding.lookup import LookupRequest, LookupRun
from pytest_cudagraph.decoding.prefill import PrefillRequest, compare_prefill, judge_chunks


@pytest.fixture
def decoder():
    torch.manual_seed(0)
    return SmallDecoder().eval().cuda()


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_tokens_are_eagers_and_every_step_is_a_replay(decoder, rows):
    prompts = torch.randint(0, 96, (rows, 6), device="cuda")
    with DecodeEngine(decoder, [1, 4]) as engine:
        assert engine.device.startswith("cuda")
        tokens, receipt = compare_with_eager(engine, prompts, 12, TOLERANCE)
    assert not judge_tokens(tokens, exact=False).verdict.fails
    assert not judge_steps(receipt).verdict.fails


def test_verified_proposals_and_decode_steps_share_the_cache(decoder):
    prompts = torch.arange(4, device="cuda").repeat(2, 3)
    with DecodeEngine(decoder, [2]) as engine:
        engine.capture(2, 4)
        eager = engine.generate(prompts, 20, graphs=False, keep_logits=True)
        request = LookupRequest(k=3, ngram=(1, 4), min_tokens_per_step=None)
        with torch.inference_mode():
            run = LookupRun(engine=engine, request=request, prompts=prompts, expected=eager.tokens, rows=2)
            found = run.run()
    assert any(call.drafted for call in run.calls)
    assert not judge_tokens(compare_logits(eager, found, TOLERANCE), exact=False).verdict.fails
    assert not judge_steps(found.receipt).verdict.fails


def test_chunks_leave_what_one_call_leaves(decoder):
    request = PrefillRequest(length=48, chunk=16, max_bytes_ratio=None, counting="activations")
    found = compare_prefill(decoder, request, TOLERANCE)
    assert not judge_chunks(found).verdict.fails
    assert found.bytes_ratio < 1


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_by_its_own_gate_and_no_other(name):
    expected, found = FAULTS[name].missed, FAULTS[name].found("cuda")
    assert found.keys() == expected.keys(), found
    assert all(text in found[gate] for gate, text in expected.items()), found
