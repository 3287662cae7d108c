"""Models for words, sounds, time series and codes, most of them by lucidrains."""

from __future__ import annotations

import torch
from tests.conformance.libraries.declared import LENGTH, ROWS, WORDS, image, model_of, sequence, tokens

# x-transformers

LAYERS = {"dim": 16, "depth": 2, "heads": 2}
SHORT = {"num_tokens": WORDS, "max_seq_len": 16}
X_DECODERS = {
    "alibi": {"alibi_pos_bias": True},
    "flash attention": {"attn_flash": True},
    "hyper-connections": {"num_residual_streams": 2},
    "relative positions and gated layers": {"rel_pos_bias": True, "ff_glu": True, "use_rmsnorm": True},
    "rotary positions": {"rotary_pos_emb": True, "attn_dim_head": 32},
    "talking heads": {"attn_pre_talking_heads": True},
    "the largest scores": {"attn_sparse_topk": 2},
}


def x_decoder(**kinds):
    from x_transformers import Decoder, TransformerWrapper

    return TransformerWrapper(**SHORT, attn_layers=Decoder(**LAYERS, **kinds)), (tokens(),), {}


for name, kinds in X_DECODERS.items():
    model_of("x_transformers", f"decoder with {name}")(lambda kinds=kinds: x_decoder(**kinds))


@model_of("x_transformers")
def encoder_with_decoder():
    from x_transformers import XTransformer

    sizes = {"num_tokens": WORDS, "depth": 1, "heads": 2, "max_seq_len": 16}
    parts = {f"{part}_{name}": size for part in ("enc", "dec") for name, size in sizes.items()}
    return XTransformer(dim=16, **parts), (tokens(), tokens(9)), {}


@model_of("x_transformers")
def encoder_of_images():
    from x_transformers import Encoder, ViTransformerWrapper

    model = ViTransformerWrapper(image_size=32, patch_size=8, num_classes=10, attn_layers=Encoder(**LAYERS))
    return model, (image(),), {}


@model_of("x_transformers", verdict="audit: host-data", line="return function(*tensor_args)")
def encoder_with_mask():
    """einx makes a tensor of the number 0 in each call."""
    from x_transformers import Encoder, TransformerWrapper

    model = TransformerWrapper(**SHORT, attn_layers=Encoder(**LAYERS))
    return model, (tokens(),), {"mask": torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 2]])}


# One model each


@model_of("performer_pytorch")
def performer():
    from performer_pytorch import PerformerLM

    return PerformerLM(num_tokens=WORDS, max_seq_len=8, dim=16, depth=2, heads=2, dim_head=8), (tokens(),), {}


@model_of("local_attention")
def local_transformer():
    from local_attention import LocalTransformer

    return LocalTransformer(**SHORT, **LAYERS, dim_head=8, local_attn_window_size=4), (tokens(),), {}


@model_of("perceiver_pytorch")
def perceiver():
    from perceiver_pytorch import Perceiver

    sizes = {"num_latents": 4, "latent_dim": 16, "latent_heads": 2, "cross_dim_head": 8, "latent_dim_head": 8}
    model = Perceiver(num_freq_bands=2, depth=2, max_freq=4.0, num_classes=5, **sizes)
    return model, (torch.randn(ROWS, 8, 8, 3),), {}


@model_of("perceiver_pytorch")
def perceiver_io():
    from perceiver_pytorch import PerceiverIO

    sizes = {"num_latents": 4, "latent_dim": 8, "latent_heads": 2, "cross_dim_head": 8, "latent_dim_head": 8}
    model = PerceiverIO(dim=8, queries_dim=8, depth=1, logits_dim=5, **sizes)
    return model, (sequence(6, 8),), {"queries": torch.randn(3, 8)}


@model_of("conformer")
def conformer():
    from conformer import Conformer

    return Conformer(16, depth=1, dim_head=8, heads=2, conv_kernel_size=3), (sequence(),), {}


@model_of("mambapy")
def mamba():
    from mambapy.mamba import Mamba, MambaConfig

    return Mamba(MambaConfig(d_model=16, n_layers=1, d_state=4)), (sequence(),), {}


@model_of("mambapy", verdict="audit: dynamic-shape+host-sync+host-data", line="torch.where(expert_mask[expert_idx])")
def jamba():
    """Its experts take the tokens by lists."""
    from mambapy.jamba import JambaLM, JambaLMConfig

    config = JambaLMConfig(
        d_model=16, n_layers=2, mlp_size=32, d_state=4, num_attention_heads=2, num_key_value_heads=1, vocab_size=WORDS,
        attn_layer_offset=1, attn_layer_period=2, num_experts=2, num_experts_per_tok=1, expert_layer_offset=1,
        expert_layer_period=2,
    )  # fmt: skip
    return JambaLM(config), (tokens(),), {}


# vector-quantize-pytorch


@model_of("vector_quantize_pytorch")
def finite_scalar_quantization():
    from vector_quantize_pytorch import FSQ

    return FSQ(levels=[4, 4], dim=8), (sequence(6, 8),), {}


@model_of("vector_quantize_pytorch")
def lookup_free_quantization():
    from vector_quantize_pytorch import LFQ

    return LFQ(codebook_size=16, dim=8), (sequence(6, 8),), {}


@model_of("vector_quantize_pytorch")
def quantization_with_one_layer():
    from vector_quantize_pytorch import SimVQ

    return SimVQ(dim=8, codebook_size=16), (sequence(6, 8),), {}


@model_of("vector_quantize_pytorch", verdict="audit: host-sync", line="if self.initted:")
def vector_quantization():
    from vector_quantize_pytorch import VectorQuantize

    return VectorQuantize(dim=8, codebook_size=16), (sequence(6, 8),), {}


# Time series


@model_of("iTransformer", verdict="note: rng")
def itransformer_with_reversible_norm():
    """The checks of beartype draw from Python's generator which entry of a list to look at."""
    from iTransformer import iTransformer

    sizes = {"num_variates": 4, "lookback_len": 16, "pred_length": 4, "dim": 16, "depth": 1, "dim_head": 8, "heads": 2}
    return iTransformer(**sizes, use_reversible_instance_norm=True, flash_attn=False), (sequence(16, 4),), {}


@model_of("pytorch_tcn")
def temporal_convolutions():
    from pytorch_tcn import TCN

    return TCN(4, [8, 8], kernel_size=3), (torch.randn(ROWS, 4, 16),), {}


FORECAST = {
    "prediction_length": 4, "context_length": 12, "lags_sequence": [1, 2], "num_time_features": 1, "d_model": 16,
    "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
}  # fmt: skip
PATCHES = {
    "num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "prediction_length": 4,
    "d_model": 16,
}  # fmt: skip


def forecaster(name, **sizes):
    import transformers

    config = getattr(transformers, f"{name}Config")(**FORECAST, **sizes)
    past, future = 14, 4
    return getattr(transformers, f"{name}Model")(config), (), {
        "past_values": torch.randn(ROWS, past), "past_time_features": torch.randn(ROWS, past, 1),
        "past_observed_mask": torch.ones(ROWS, past), "future_values": torch.randn(ROWS, future),
        "future_time_features": torch.randn(ROWS, future, 1),
    }  # fmt: skip


@model_of("transformers", verdict="audit: host-data", line="k_sample = key_states[:, index_sample, :]")
def informer():
    """It draws the keys of its sparse attention on the host."""
    return forecaster("Informer")


@model_of("transformers", verdict="audit: host-data", line=".to(value_states.device)")
def autoformer():
    return forecaster("Autoformer", moving_average=5, label_length=4)


@model_of("transformers")
def patchtst():
    from transformers import PatchTSTConfig, PatchTSTForPrediction

    config = PatchTSTConfig(**PATCHES, num_hidden_layers=1, num_attention_heads=2, ffn_dim=16)
    return PatchTSTForPrediction(config), (), {"past_values": sequence(16, 2)}


@model_of("transformers")
def patchtsmixer():
    from transformers import PatchTSMixerConfig, PatchTSMixerForPrediction

    return PatchTSMixerForPrediction(PatchTSMixerConfig(**PATCHES, num_layers=1)), (), {"past_values": sequence(16, 2)}


# transformers, for images


@model_of("transformers")
def detr():
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    config = DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone, d_model=16,
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16,
        decoder_ffn_dim=16, num_queries=4,
    )  # fmt: skip
    return DetrForObjectDetection(config), (), {"pixel_values": image()}


@model_of("transformers")
def segformer():
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2],
        num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=8,
    )  # fmt: skip
    return SegformerForSemanticSegmentation(config), (), {"pixel_values": image()}
