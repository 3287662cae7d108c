"""Eleven families of transformers, two dtypes, full and padded batches: correct generations are never called wrong."""

from __future__ import annotations

import pytest
import torch

from pytest_cudagraph import DecodeEngine, static_decoder
from pytest_cudagraph.check.compare import Tolerance
from pytest_cudagraph.decoding.agreement import compare_with_eager, judge_steps, judge_tokens

transformers = pytest.importorskip("transformers", reason="the families are those of transformers")

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("default")]

LENGTH = 512
COMMON = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": LENGTH, "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip
GPT2 = {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": LENGTH, "eos_token_id": None}
TRANSLATION = {
    "vocab_size": 128, "d_model": 64, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "pad_token_id": 0,
    "decoder_start_token_id": 0, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
T5 = {
    "vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_decoder_layers": 2, "num_heads": 4,
    "pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": None,
}  # fmt: skip
FAMILIES = {
    "LlamaForCausalLM": COMMON,
    "MistralForCausalLM": COMMON | {"sliding_window": 16},
    "MixtralForCausalLM": COMMON | {"num_local_experts": 4},
    "Qwen2ForCausalLM": COMMON,
    "GemmaForCausalLM": COMMON | {"head_dim": 16},
    "GPTNeoXForCausalLM": COMMON,
    "PhiForCausalLM": COMMON,
    "GPT2LMHeadModel": GPT2,
    "T5ForConditionalGeneration": T5,
    "BartForConditionalGeneration": TRANSLATION | {"max_position_embeddings": LENGTH, "forced_eos_token_id": None},
    "WhisperForConditionalGeneration": TRANSLATION | {"max_target_positions": LENGTH, "max_source_positions": 24},
}
LENGTHS = ((1, 33), (17, 33), (120, 2), (448, 65))
"""Of prompts and outputs."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_correct_generation_is_called_wrong(family, dtype, kind):
    torch.manual_seed(0)
    model_class = getattr(transformers, family)
    config = model_class.config_class(**FAMILIES[family])
    model = model_class(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.15) if weight.ndim > 1 else None
    states = torch.randn(8, 24, 64).to(kind, dtype) if config.is_encoder_decoder else None
    decoder = static_decoder(model.to(kind, dtype), LENGTH, encoder_states=states)
    missed = []
    with DecodeEngine(decoder, [1, 4, 8]) as engine:
        for rows in (1, 3, 4, 5, 8):
            for length, count in LENGTHS:
                prompts = torch.randint(0, 128, (rows, length), generator=torch.Generator().manual_seed(length))
                tokens, receipt = compare_with_eager(engine, prompts.to(engine.device), count, Tolerance())
                judgements = (judge_steps(receipt), judge_tokens(tokens, exact=False))
                missed += [(rows, length, count, each.reason) for each in judgements if each.verdict.fails]
    assert missed == []
