"""One decode step of a tiny random Llama with a static cache, the way serving code captures it.

The cache has a fixed length and keeps its position in a tensor, so that one graph serves every step; a cache that grows
by ``cat``, or a position in a Python integer, would be baked into the graph. Each call moves the position on: the check
compares cache and position after each replay with eager's, and the measurement starts every call from the same step.
"""

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="the Llama example needs transformers")

MAX_LENGTH = 32
PROMPT_LENGTH = 5


class DecodeStep(nn.Module):
    """Llama with a cache of its own that holds a prompt already: next token ids in, logits out."""

    def __init__(self, batch_size: int, device: str) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=MAX_LENGTH,
        )
        self.llama = transformers.LlamaForCausalLM(config).to(device).eval()
        self.cache = transformers.StaticCache(config=config, max_cache_len=MAX_LENGTH)
        with torch.no_grad():
            self(torch.randint(0, config.vocab_size, (batch_size, PROMPT_LENGTH), device=device))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.llama(input_ids=tokens, past_key_values=self.cache, use_cache=True).logits


@pytest.mark.parametrize("batch_size", [1, 2, 4, 8])
def test_llama_decode(cudagraph, batch_size):
    """The cache has one row per sequence, so each batch size has a model of its own."""
    step = DecodeStep(batch_size, cudagraph.device)
    next_tokens = torch.randint(0, 128, (batch_size, 1), device=cudagraph.device)
    cudagraph(step, next_tokens, batch_sizes=[batch_size])
