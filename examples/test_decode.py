"""Greedy decoding with captured steps: tokens equal to eager's, a graph on every step, and then the speed of a step."""

import pytest
import torch
from small_decoder import SmallDecoder


@pytest.mark.decode(min_speedup=1.15, prompt_lengths=[8], output_lengths=[24], batch_sizes=[1, 4])
def test_own_decoder(decode_engine):
    decoder = SmallDecoder().eval().to(decode_engine.device)
    decode_engine(decoder).greedy()


@pytest.mark.decode(min_speedup=1.15, prompt_lengths=[16], output_lengths=[16], batch_sizes=[3])
def test_llama(decode_engine):
    """A batch of 3 is padded to the graph of 4. Its logits are compared step by step, with eager's tokens as input."""
    transformers = pytest.importorskip("transformers", reason="the Llama example needs transformers")
    from pytest_cudagraph import static_decoder

    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    with torch.device(decode_engine.device):
        model = transformers.LlamaForCausalLM(config).eval()
    decode_engine(static_decoder(model, max_length=64), graph_sizes=[4]).greedy()


def test_long_prompt(decode_engine):
    """A prompt of 32768 tokens for two layers of Llama 3.1 8B, on ``meta``: bytes are counted, nothing is computed."""
    with torch.device("meta"):
        decoder = SmallDecoder(
            rows=1,
            length=32768,
            vocabulary=128256,
            hidden=4096,
            heads=32,
            kv_heads=8,
            inner=14336,
            layers=2,
            last_only=True,
        ).to(torch.bfloat16)
    decode_engine(decoder).prefill(32768, chunk=2048, max_bytes_ratio=0.10, counting="activations")


def test_prompt_lookup(decode_engine):
    """A random model repeats little of its prompt. The tokens are greedy's all the same."""
    decoder = SmallDecoder().eval().to(decode_engine.device)
    prompts = torch.arange(8, device=decode_engine.device).repeat(2, 2)
    decode_engine(decoder).prompt_lookup(prompts, k=3, ngram=(1, 3), output_length=24, min_tokens_per_step=1.0)
