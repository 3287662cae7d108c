"""A prompt in chunks gives what one call gives, and its bytes are counted exactly, also without memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from examples.small_decoder import SmallDecoder
from tests import facts

from pytest_cudagraph.check.compare import Tolerance
from pytest_cudagraph.decoding.prefill import (
    PeakBytes,
    PrefillRequest,
    compare_prefill,
    judge_bytes,
    judge_chunks,
    judge_prefill,
)
from pytest_cudagraph.errors import InputError

LLAMA_8B = {"vocabulary": 128256, "hidden": 4096, "heads": 32, "kv_heads": 8, "inner": 14336}


def request_for(length=48, chunk=8, max_bytes_ratio=None, counting="activations"):
    return PrefillRequest(length=length, chunk=chunk, max_bytes_ratio=max_bytes_ratio, counting=counting)


def verdicts(found, max_bytes_ratio=None):
    report = judge_prefill(found, request_for(max_bytes_ratio=max_bytes_ratio))
    return {each.gate for each in report.judgements if each.verdict.fails}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_peak_counts_what_lives_at_once_with_the_size_of_its_storage(device):
    own = torch.zeros(10, 10, device=device)
    with PeakBytes([own]) as counted:
        first = torch.zeros(100, 10, device=device)
        second = first @ own
        del first
        third = second.view(-1)[:5] + 1  # a small part of a new tensor, and a view of an old one
        del second
        own.add_(1)
        fourth = third.expand(3, 5)
        assert counted.peak_bytes == 8000
        del third, fourth
        torch.zeros(2100, device=device)
    assert (counted.peak_bytes, counted.written_bytes, counted.read_bytes) == (8400, 400, 0)


@pytest.mark.parametrize("chunk", [1, 7, 16, 48])
def test_chunks_of_any_size_leave_the_logits_and_the_cache_of_one_call(chunk):
    torch.manual_seed(0)
    found = compare_prefill(SmallDecoder(last_only=True).eval(), request_for(chunk=chunk), Tolerance())
    assert found.largest_difference is not None
    assert verdicts(found) == set()


class _RulesOut(SmallDecoder):
    """One token is ruled out. A wrong one forgets its cache in each call."""

    def __init__(self, *, is_wrong):
        super().__init__(last_only=True)
        self.is_wrong = is_wrong

    def forward(self, tokens):
        if self.is_wrong:
            self.reset()
        return super().forward(tokens).index_fill(-1, torch.tensor(3), float("-inf"))


@pytest.mark.parametrize(("is_wrong", "missed"), [(False, set()), (True, {"tokens"})])
def test_a_token_that_is_ruled_out_hides_no_difference_and_makes_none(is_wrong, missed):
    torch.manual_seed(0)
    found = compare_prefill(_RulesOut(is_wrong=is_wrong).eval(), request_for(), Tolerance())
    assert verdicts(found) == missed


def test_meta_counts_the_same_bytes_without_values():
    found = {}
    for device in ("cpu", "meta"):
        with torch.device(device):
            decoder = SmallDecoder(last_only=True).eval()
        found[device] = compare_prefill(decoder, request_for(), Tolerance())
    assert (found["meta"].whole, found["meta"].chunked) == (found["cpu"].whole, found["cpu"].chunked)
    assert (found["meta"].largest_difference, verdicts(found["meta"])) == (None, set())
    # What was not compared has not passed.
    assert [each.gate for each in judge_prefill(found["meta"], request_for()).judgements] == ["bytes"]
    cache = 2 * 2 * 64 * 2 * 8 * 4 * 4 + 4 * 8  # layers, keys and values, slots, heads, size, rows, bytes; positions
    assert found["cpu"].whole.cache_bytes == cache


def test_a_chunk_of_2048_takes_a_tenth_of_the_activations_of_32768_tokens_for_a_model_of_8b_parameters():
    with torch.device("meta"):
        decoder = SmallDecoder(rows=1, length=32768, last_only=True, **LLAMA_8B).to(torch.bfloat16)
    found = compare_prefill(decoder, request_for(32768, 2048), Tolerance())
    assert verdicts(found, 0.10) == set()
    assert verdicts(found, 0.05) == {"bytes"}


def test_a_model_of_transformers_is_counted_on_meta():
    transformers = pytest.importorskip("transformers", reason="the adapter is for transformers")
    from pytest_cudagraph import static_decoder

    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, dtype=torch.float32,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).eval()
    found = compare_prefill(static_decoder(model, 64), request_for(), Tolerance())
    assert found.whole.cache_bytes == 2 * (2 * 64 * 2 * 8 * 4 + 8)
    assert found.bytes_ratio < 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"chunk": 0}, "chunk is a number of tokens of at least 1 and at most the prompt's 48; found 0"),
        ({"chunk": 49}, "chunk is a number of tokens of at least 1 and at most the prompt's 48; found 49"),
        ({"length": 2.5}, "length is a number of tokens of at least 1; found 2.5"),
        ({"length": 65}, "the decoder holds 64 tokens; found a prompt of 65"),
        ({"max_bytes_ratio": "half"}, "max_bytes_ratio is a number above 0; found 'half'"),
        ({"counting": "all"}, "counting is one of activations, activations.cache, activations.cache.weights; found"),
    ],
)
def test_a_request_that_makes_no_sense_is_one_clear_error(wrong, message):
    with pytest.raises(InputError, match=message):
        compare_prefill(SmallDecoder().eval(), request_for(**wrong), Tolerance())


def test_the_messages_of_the_gates(golden):
    found = {each: replace(facts.prefill(), largest_difference=each) for each in (0.0, 0.47)}
    judgements = [judge_chunks(each) for each in found.values()]
    judgements += [judge_bytes(found[0.0], ratio) for ratio in (None, 0.5, 0.4)]
    lines = [
        "\n  ".join([f"{each.verdict.value}: {each.reason}", *each.evidence, *([each.remedy] if each.remedy else [])])
        for each in judgements
    ]
    golden("gate_prefill.txt", "\n".join(lines))
