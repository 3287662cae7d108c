"""Eight families of transformers, two dtypes, full and padded batches: correct generations are never called wrong."""

from __future__ import annotations

import pytest
import torch

from pytest_cudagraph import DecodeEngine, gate, static_decoder
from pytest_cudagraph.check.compare import Tolerance
from pytest_cudagraph.generation.agreement import compare_with_eager

transformers = pytest.importorskip("transformers", reason="the families are those of transformers")

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("default")]

COMMON = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip
GPT2 = {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "eos_token_id": None}
FAMILIES = {
    "LlamaForCausalLM": COMMON,
    "MistralForCausalLM": COMMON | {"sliding_window": 16},
    "MixtralForCausalLM": COMMON | {"num_local_experts": 4},
    "Qwen2ForCausalLM": COMMON,
    "GemmaForCausalLM": COMMON | {"head_dim": 16},
    "GPTNeoXForCausalLM": COMMON,
    "PhiForCausalLM": COMMON,
    "GPT2LMHeadModel": GPT2,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_correct_generation_is_called_wrong(family, dtype):
    torch.manual_seed(0)
    kind = getattr(transformers, family)
    model = kind(kind.config_class(**FAMILIES[family])).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.15) if weight.ndim > 1 else None
    missed = []
    with DecodeEngine(static_decoder(model.to(dtype), 200), [1, 4, 8]) as engine:
        for rows in (1, 3, 4, 5, 8):
            for length, count in ((1, 33), (17, 33), (120, 2), (120, 64)):
                prompts = torch.randint(0, 128, (rows, length), generator=torch.Generator().manual_seed(length))
                tokens, receipt = compare_with_eager(engine, prompts, count, Tolerance())
                judgements = (gate.judge_steps(receipt), gate.judge_tokens(tokens, exact=False))
                missed += [(rows, length, count, each.reason) for each in judgements if each.verdict.fails]
    assert missed == []
