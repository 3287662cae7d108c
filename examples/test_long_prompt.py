"""A long prompt in chunks: the logits and the cache of one call, with a fraction of its activations."""

import torch
from small_decoder import SmallDecoder


def test_chunks_give_what_one_call_gives(decode_engine):
    decoder = SmallDecoder(length=512, last_only=True).eval().to(decode_engine.device)
    decode_engine(decoder).prefill(512, chunk=64, max_bytes_ratio=0.20, counting="activations")


def test_32k(decode_engine):
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
