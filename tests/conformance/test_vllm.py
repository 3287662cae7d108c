"""The adapter for vLLM against vLLM itself, on a CPU with a model of random weights.

vLLM has no graphs on a CPU. So both modes run eagerly, and the adapter must say so.
"""

from __future__ import annotations

import importlib.util

import pytest

from pytest_cudagraph import vllm
from pytest_cudagraph.decoding.modes.engines import LoadRequest
from pytest_cudagraph.decoding.modes.mode_run import ModeRequest, run_mode
from pytest_cudagraph.decoding.results import GenerationReceipt

NONE = "vLLM's runtime mode was NONE"
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11], [7]]
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: tox run -e engines"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("qwen3")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def run(model, *, graphs, **arguments):
    engine = vllm(
        model, skip_tokenizer_init=True, dtype="float32", max_model_len=128, max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
    )  # fmt: skip
    load = LoadRequest(graphs=graphs, rows=3, device="cpu", threads=1)
    request = ModeRequest(engine=engine, load=load, arguments=arguments, prompts=PROMPTS, count=16, generations=2)
    return run_mode(request, 400)


def tokens_of(found):
    assert found.mode.failure is None, found.mode.failure
    return [[row.tokens for row in generation] for generation in found.generations]


def test_both_modes_give_the_same_tokens_and_the_adapter_counts_each_decode_step(model):
    eager, graphs = run(model, graphs=False), run(model, graphs=True)
    assert tokens_of(eager) == tokens_of(graphs)
    # One step prefills all three prompts, and 15 decode, in each of 2 generations.
    receipt = GenerationReceipt(steps=30, replays=0, eager={NONE: 30})
    assert (eager.mode.receipt, graphs.mode.receipt) == (receipt, receipt)
    assert any("graph" in line.lower() for line in graphs.mode.output)


def test_steps_that_verify_drafts_are_decode_steps(model):
    plain, drafted = run(model, graphs=False), run(model, graphs=False, speculative_config=DRAFTS)
    assert tokens_of(drafted) == tokens_of(plain)
    receipt = drafted.mode.receipt
    assert 0 < receipt.steps <= 30
    assert (receipt.replays, receipt.eager) == (0, {NONE: receipt.steps})


def test_vllms_own_error_is_kept(model):
    failure = run(model, graphs=False, max_model_len=100_000).mode.failure
    assert (failure.stage, failure.is_raised) == ("load", True)
    assert "max_model_len" in failure.error
