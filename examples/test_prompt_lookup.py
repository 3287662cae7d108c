"""Prompt lookup: tokens proposed from the prompt are verified in one captured call. The tokens are greedy's."""

import torch
from small_decoder import SmallDecoder


def test_repeated_text(decode_engine):
    """With such weights a token depends on the last ones alone. So the text repeats, and proposals are right."""
    decoder = SmallDecoder(length=128).eval().to(decode_engine.device)
    with torch.no_grad():
        for layer in decoder.layers:
            layer.out.weight.mul_(0.01)
    prompts = torch.arange(8, device=decode_engine.device).repeat(2, 4)
    decode_engine(decoder).prompt_lookup(prompts, k=3, ngram=(2, 4), output_length=64, min_tokens_per_step=1.5)


def test_new_text(decode_engine):
    """A random model repeats little of its prompt. The tokens are greedy's all the same."""
    decoder = SmallDecoder().eval().to(decode_engine.device)
    prompts = torch.arange(8, device=decode_engine.device).repeat(2, 2)
    decode_engine(decoder).prompt_lookup(prompts, k=3, ngram=(1, 3), output_length=24, min_tokens_per_step=1.0)
