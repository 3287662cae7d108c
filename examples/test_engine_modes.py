"""One engine, eagerly and with graphs, each in a process of its own: equal tokens, graphs really used, then speed."""

import pytest


def make_llama():
    """Called in the process of each mode. Random weights are the same in both."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).eval()


def test_llama(engine_modes):
    pytest.importorskip("transformers", reason="the Llama example needs transformers")
    from pytest_cudagraph import transformers_engine

    prompts = [[5, 17, 42, 99, 3, 61, 8, 120], [7, 7, 21, 90, 33, 64, 2, 11]]
    engine_modes(transformers_engine(make_llama, max_length=64), prompts=prompts, output_length=32, min_speedup=1.05)
