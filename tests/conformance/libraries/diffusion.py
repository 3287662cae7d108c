"""Diffusion models: diffusers and denoising-diffusion-pytorch."""

from __future__ import annotations

import torch
from tests.conformance.libraries.declared import ROWS, image, model_of, sequence, steps
from torch import nn

HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}
TEXT = 16
"""The width of an encoded prompt."""


def latents(*sizes):
    return torch.randn(ROWS, 4, *(sizes or (8, 8)))


def prompt():
    return sequence(5, TEXT)


@model_of("diffusers")
def dit():
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(**HEADS, num_layers=2, sample_size=8, num_embeds_ada_norm=10)
    return model, (latents(),), {"timestep": steps(10), "class_labels": steps(10)}


@model_of("diffusers")
def sd3():
    from diffusers import SD3Transformer2DModel

    widths = {"joint_attention_dim": TEXT, "caption_projection_dim": 16, "pooled_projection_dim": 16}
    model = SD3Transformer2DModel(8, 2, 4, 2, 8, 2, out_channels=4, pos_embed_max_size=8, **widths)
    return model, (latents(), prompt(), torch.randn(ROWS, 16), steps()), {}


@model_of("diffusers")
def flux():
    from diffusers import FluxTransformer2DModel

    widths = {"joint_attention_dim": TEXT, "pooled_projection_dim": 16, "axes_dims_rope": (4, 4, 8)}
    model = FluxTransformer2DModel(1, 4, None, 1, 1, 16, 2, **widths)
    given = {"encoder_hidden_states": prompt(), "pooled_projections": torch.randn(ROWS, 16)}
    ids = {"img_ids": torch.zeros(6, 3), "txt_ids": torch.zeros(5, 3)}
    return model, (sequence(6, 4),), {**given, **ids, "timestep": torch.rand(ROWS)}


@model_of("diffusers")
def pixart():
    from diffusers import PixArtTransformer2DModel

    widths = {"cross_attention_dim": 16, "caption_channels": TEXT}
    model = PixArtTransformer2DModel(
        **HEADS, **widths, num_layers=2, sample_size=8, use_additional_conditions=False
    )  # fmt: skip
    return model, (latents(),), {"encoder_hidden_states": prompt(), "timestep": steps()}


@model_of("diffusers")
def wan():
    from diffusers import WanTransformer3DModel

    widths = {"text_dim": TEXT, "freq_dim": 16, "ffn_dim": 32}
    model = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, num_layers=1, **widths
    )
    return model, (latents(2, 8, 8), steps(), prompt()), {}


def unet():
    from diffusers import UNet2DModel

    down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    return UNet2DModel(
        16, block_out_channels=(8, 8), down_block_types=down, up_block_types=up, layers_per_block=1,
        attention_head_dim=4, norm_num_groups=4,
    )  # fmt: skip


@model_of("diffusers")
def unet_with_step_per_row():
    return unet(), (image(16), steps()), {}


@model_of("diffusers", verdict="audit: host-data", line="timesteps = torch.tensor([timesteps]")
def unet_with_step_as_number():
    return unet(), (image(16), 7), {}


CONDITIONED = {
    "block_out_channels": (8, 8), "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "layers_per_block": 1,
    "attention_head_dim": 4, "norm_num_groups": 4, "cross_attention_dim": TEXT,
}  # fmt: skip


@model_of("diffusers")
def conditioned_unet():
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(8, up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), **CONDITIONED)
    return model, (latents(), torch.tensor(5), prompt()), {}


@model_of("diffusers")
def controlnet():
    from diffusers import ControlNetModel

    model = ControlNetModel(conditioning_embedding_out_channels=(4, 4), **CONDITIONED)
    return model, (latents(), steps(), prompt(), image(16)), {}


AUTOENCODER = {
    "block_out_channels": (8, 8), "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2, "norm_num_groups": 4,
}  # fmt: skip


@model_of("diffusers")
def autoencoder():
    from diffusers import AutoencoderKL

    return AutoencoderKL(**AUTOENCODER), (image(16),), {}


@model_of("diffusers")
def vq_autoencoder():
    from diffusers import VQModel

    return VQModel(**AUTOENCODER, num_vq_embeddings=16), (image(16),), {}


class Sampling(nn.Module):
    """The steps of a scheduler, whose tables are plain attributes of a plain object."""

    def __init__(self, scheduler):
        super().__init__()
        self.unet, self.scheduler = unet(), scheduler
        scheduler.set_timesteps(2)

    def forward(self, x):
        for step in self.scheduler.timesteps:
            x = self.scheduler.step(self.unet(x, step).sample, step, x).prev_sample
        return x


@model_of("diffusers", verdict="note: host-sync", on_cuda="audit: host-data", line="timesteps[None].to(sample.device)")
def ddim_sampling():
    from diffusers import DDIMScheduler

    return Sampling(DDIMScheduler()), (image(16),), {}


# denoising-diffusion-pytorch


@model_of("denoising_diffusion_pytorch")
def guided_unet():
    from denoising_diffusion_pytorch import Unet

    return Unet(8, dim_mults=(1, 2), attn_dim_head=8, attn_heads=2), (image(16), steps(100)), {}


@model_of("denoising_diffusion_pytorch", verdict="note: rng")
def diffusion_loss():
    """It draws the time steps and the noise."""
    from denoising_diffusion_pytorch import GaussianDiffusion

    model, _, _ = guided_unet()
    return GaussianDiffusion(model, image_size=16, timesteps=10), (image(16),), {}
