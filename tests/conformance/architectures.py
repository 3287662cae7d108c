"""Real architectures at toy size, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

LENGTH = 8
WORDS = 50

# The same sizes under the names that most configurations share.
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
FEW_KEYS = {**SIZES, "num_key_value_heads": 1}
# With its cache the model copies the size of the window to the device in every call.
WINDOW = {**FEW_KEYS, "sliding_window": 4, "use_cache": False}
PATCHES = {**SIZES, "image_size": 16, "patch_size": 8}
T5 = {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
GPT2 = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
DISTILBERT = {"vocab_size": WORDS, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}
OPT = {**SIZES, "ffn_dim": 32, "word_embed_proj_dim": 16, "max_position_embeddings": 32}
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
WHISPER = {
    "vocab_size": WORDS, "d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_mel_bins": 8,
    "max_source_positions": 16, "pad_token_id": 0, "decoder_start_token_id": 0,
    "suppress_tokens": [], "begin_suppress_tokens": [],
}  # fmt: skip


class Architecture(NamedTuple):
    """The model's and the configuration's classes by name, what differs from their defaults, and the inputs."""

    model: str
    config: str
    sizes: dict[str, Any]
    inputs: Callable[[], dict[str, torch.Tensor]]
    part: str = ""
    """A method of the model that gives the part to be used."""

    def build(self):
        import transformers

        # Each configuration takes tokens beyond its toy vocabulary for granted.
        tokens = {"bos_token_id": 0, "eos_token_id": 1} if "vocab_size" in self.sizes else {}
        config = getattr(transformers, self.config)(**{**tokens, **self.sizes})
        model = getattr(transformers, self.model)(config).eval()
        return (getattr(model, self.part)() if self.part else model), (), self.inputs()


def tokens():
    return {"input_ids": torch.randint(2, WORDS, (2, LENGTH))}


def padded():
    mask = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 2]])).long()
    return {**tokens(), "attention_mask": mask}


def image(size):
    return lambda: {"pixel_values": torch.randn(2, 3, size, size)}


def sound():
    return {"input_features": torch.randn(2, 8, 32)}


def from_one_language_to_another():
    return {**padded(), "decoder_input_ids": torch.randint(2, WORDS, (2, 4))}


ARCHITECTURES = {
    "bert": Architecture("BertModel", "BertConfig", SIZES, padded),
    "distilbert": Architecture("DistilBertModel", "DistilBertConfig", DISTILBERT, padded),
    "roberta": Architecture("RobertaModel", "RobertaConfig", SIZES, padded),
    "electra": Architecture("ElectraModel", "ElectraConfig", {**SIZES, "embedding_size": 16}, padded),
    "gpt2": Architecture("GPT2LMHeadModel", "GPT2Config", GPT2, padded),
    "gpt-neox": Architecture("GPTNeoXForCausalLM", "GPTNeoXConfig", SIZES, padded),
    "opt": Architecture("OPTForCausalLM", "OPTConfig", OPT, padded),
    "llama": Architecture("LlamaForCausalLM", "LlamaConfig", FEW_KEYS, padded),
    "mistral": Architecture("MistralForCausalLM", "MistralConfig", WINDOW, padded),
    "mixtral": Architecture("MixtralForCausalLM", "MixtralConfig", {**FEW_KEYS, "num_local_experts": 4}, padded),
    "qwen2": Architecture("Qwen2ForCausalLM", "Qwen2Config", FEW_KEYS, padded),
    "gemma2": Architecture("Gemma2ForCausalLM", "Gemma2Config", {**WINDOW, "head_dim": 8}, padded),
    "phi3": Architecture("Phi3ForCausalLM", "Phi3Config", {**FEW_KEYS, "pad_token_id": 0}, padded),
    "mamba": Architecture("MambaForCausalLM", "MambaConfig", {**SIZES, "state_size": 4, "use_cache": False}, tokens),
    "t5 encoder": Architecture("T5EncoderModel", "T5Config", T5, padded),
    "t5": Architecture("T5Model", "T5Config", T5, from_one_language_to_another),
    "clip text": Architecture("CLIPTextModel", "CLIPTextConfig", {**SIZES, "max_position_embeddings": 16}, tokens),
    "vit": Architecture("ViTModel", "ViTConfig", PATCHES, image(16)),
    "dinov2": Architecture("Dinov2Model", "Dinov2Config", PATCHES, image(16)),
    "swin": Architecture("SwinModel", "SwinConfig", SWIN, image(32)),
    "resnet": Architecture("ResNetModel", "ResNetConfig", RESNET, image(32)),
    "whisper encoder": Architecture("WhisperModel", "WhisperConfig", WHISPER, sound, "get_encoder"),
}
