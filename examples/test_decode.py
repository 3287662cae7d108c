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
