"""One decode step of a tiny random Llama with a static cache, the way serving code captures it.

The cache has a fixed length and the position is a tensor, so that one graph serves every step; a cache that grows by
``cat`` or a position in a Python integer would be baked into the graph.
"""

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="the Llama example needs transformers")

BATCH_SIZES = (1, 2, 4, 8)


class DecodeStep(nn.Module):
    """Llama with its own static cache: token ids and a position in, logits out."""

    def __init__(self, batch_size: int, max_length: int = 32) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=max_length,
        )
        self.llama = transformers.LlamaForCausalLM(config)
        self.cache = transformers.StaticCache(config=config, max_cache_len=max_length)
        head_size = config.hidden_size // config.num_attention_heads
        shape = {"batch_size": batch_size, "num_heads": config.num_key_value_heads, "head_dim": head_size}
        self.cache.early_initialization(**shape, dtype=torch.float32, device=torch.device("cpu"))

    def forward(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        output = self.llama(
            input_ids=token,
            position_ids=position.unsqueeze(0),
            cache_position=position,
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.logits


@pytest.mark.parametrize("batch_size", BATCH_SIZES)
def test_llama_decode(cudagraph, batch_size):
    """The cache has one row per sequence, so each batch size has a model of its own."""
    step = DecodeStep(batch_size).eval()
    token = torch.randint(0, 128, (batch_size, 1))
    position = torch.tensor([5])
    cudagraph(step, token, position, batch_sizes=[batch_size], batch_dim=(0, None))
