"""Models for images: torchvision, timm, segment-anything, open_clip, vit-pytorch, MONAI, ultralytics."""

from __future__ import annotations

import importlib

import torch
from tests.conformance.libraries.declared import ROWS, WORDS, image, model_of, tokens
from torch import nn

# torchvision


@model_of("torchvision")
def resnet():
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10), (image(),), {}


@model_of("torchvision")
def densenet():
    from torchvision.models import DenseNet

    return DenseNet(4, (2, 2), 8, num_classes=10), (image(),), {}


@model_of("torchvision")
def shufflenet():
    from torchvision.models import ShuffleNetV2

    return ShuffleNetV2([1, 1, 1], [8, 8, 16, 32, 32], num_classes=10), (image(),), {}


@model_of("torchvision")
def convnext():
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)], num_classes=10), (image(),), {}


@model_of("torchvision")
def swin():
    from torchvision.models import SwinTransformer

    return SwinTransformer([4, 4], 8, [1, 1], [2, 2], [4, 4], num_classes=10), (image(),), {}


@model_of("torchvision")
def maxvit():
    from torchvision.models import MaxVit

    return MaxVit((32, 32), 8, 4, [8], [1], 8, 0.0, num_classes=10), (image(),), {}


@model_of("torchvision")
def vit():
    from torchvision.models import VisionTransformer

    return VisionTransformer(16, 8, 2, 2, 16, 32, num_classes=10), (image(16),), {}


def backbone():
    from torchvision.models import MobileNetV2

    features = MobileNetV2(width_mult=0.1, round_nearest=4).features[:4]
    features.out_channels = 4
    return features


@model_of("torchvision")
def fcn():
    from torchvision.models._utils import IntermediateLayerGetter
    from torchvision.models.segmentation.fcn import FCN, FCNHead

    return FCN(IntermediateLayerGetter(backbone(), {"3": "out"}), FCNHead(4, 5)), (image(),), {}


class Detection(nn.Module):
    """A detector takes a list of images."""

    def __init__(self, detector):
        super().__init__()
        self.detector = detector

    def forward(self, images):
        return self.detector(list(images))


@model_of("torchvision", verdict="audit: host-data+dynamic-shape", line="torch.as_tensor(self.image_mean")
def retinanet():
    from torchvision.models.detection import RetinaNet
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.retinanet import RetinaNetHead

    anchors = AnchorGenerator(((8,),), ((1.0,),))
    head = RetinaNetHead(4, 1, 5, norm_layer=nn.Identity)
    detector = RetinaNet(backbone(), 5, min_size=32, max_size=32, anchor_generator=anchors, head=head)
    return Detection(detector), (image(),), {}


class FewUpdates(nn.Module):
    """RAFT's default is twelve updates of the flow."""

    def __init__(self, raft):
        super().__init__()
        self.raft = raft

    def forward(self, first, second):
        return self.raft(first, second, num_flow_updates=1)


@model_of("torchvision", verdict="audit: host-data", line=".to(")
def raft():
    """On CUDA an earlier line is found too: a CPU cannot tell that the default ``torch.device(device)`` is the host."""
    from torchvision.models.optical_flow import raft_small

    return FewUpdates(raft_small()), (image(128), image(128)), {}


# timm

OF_DEPTH_2 = {"img_size": 32, "embed_dim": 16, "depth": 2, "num_heads": 2}
TIMM = {
    "beit_base_patch16_224": OF_DEPTH_2,
    "cait_xxs24_224": OF_DEPTH_2,
    "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)},
    "davit_tiny": {"depths": (1, 1), "embed_dims": (8, 16), "num_heads": (2, 2)},
    "eva02_tiny_patch14_224": {**OF_DEPTH_2, "img_size": 28},
    "fastvit_t8": {"layers": (1, 1, 1, 1), "embed_dims": (8, 8, 16, 16)},
    "hiera_tiny_224": {"img_size": 64, "embed_dim": 16, "stages": (1, 1, 1, 1)},
    "levit_128s": {"img_size": 64, "embed_dim": (16, 16, 16), "key_dim": 8, "depth": (1, 1, 1), "num_heads": (2, 2, 2)},
    "mambaout_femto": {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)},
    "naflexvit_base_patch16_gap": {"embed_dim": 16, "depth": 2, "num_heads": 2},
    "pvt_v2_b0": {"depths": (1, 1, 1, 1), "embed_dims": (8, 8, 16, 16), "num_heads": (1, 2, 2, 2)},
    "swin_tiny_patch4_window7_224": {
        "img_size": 32, "window_size": 4, "embed_dim": 8, "depths": (2, 1), "num_heads": (2, 2)
    },
    "swinv2_tiny_window8_256": {
        "img_size": 32, "window_size": 4, "embed_dim": 8, "depths": (2, 1), "num_heads": (2, 2)
    },
    "vit_tiny_patch16_224": OF_DEPTH_2,
    "xcit_nano_12_p16_224": OF_DEPTH_2,
}  # fmt: skip


def of_timm(name, sizes):
    import timm

    return timm.create_model(name, num_classes=10, **sizes), (image(sizes.get("img_size", 32)),), {}


for name, sizes in TIMM.items():
    model_of("timm", name)(lambda name=name, sizes=sizes: of_timm(name, sizes))


@model_of("timm", verdict="audit: host-data", line=".to(device=device, dtype=dtype)")
def dinov3():
    """The positions are made on the host."""
    return of_timm("vit_small_patch16_dinov3", OF_DEPTH_2)


@model_of("timm", verdict="audit: host-data", line="torch.zeros(shape).to(device=device, dtype=torch.bool)")
def edgenext():
    return of_timm("edgenext_xx_small", {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 24), "heads": (2, 2, 2, 2)})


# segment-anything


def sam_encoder_of(**sizes):
    from segment_anything.modeling import ImageEncoderViT

    encoder = ImageEncoderViT(64, 16, embed_dim=16, depth=2, num_heads=2, out_chans=8, window_size=2, **sizes)
    return encoder, (image(64),), {}


@model_of("segment_anything")
def sam_encoder():
    return sam_encoder_of()


@model_of("segment_anything", verdict="audit: host-data", line="rel_pos_resized[relative_coords.long()]")
def sam_encoder_with_relative_positions():
    return sam_encoder_of(use_rel_pos=True)


class PromptToMask(nn.Module):
    def __init__(self, prompt_encoder, mask_decoder):
        super().__init__()
        self.prompt_encoder, self.mask_decoder = prompt_encoder, mask_decoder

    def forward(self, embedding, points, labels):
        sparse, dense = self.prompt_encoder((points, labels), None, None)
        return self.mask_decoder(embedding, self.prompt_encoder.get_dense_pe(), sparse, dense, True)


@model_of(
    "segment_anything",
    batch_dim=(None, 0, 0),
    verdict="audit: dynamic-shape",
    line="point_embedding[labels == -1] += self.not_a_point_embed.weight",
)
def sam_decoder():
    """Many prompts for one image. It takes the points by masks."""
    from segment_anything.modeling import MaskDecoder, PromptEncoder, TwoWayTransformer

    decoder = MaskDecoder(
        transformer_dim=16, transformer=TwoWayTransformer(1, 16, 2, 32), iou_head_hidden_dim=16, iou_head_depth=2
    )
    points, labels = torch.rand(ROWS, 3, 2) * 64, torch.ones(ROWS, 3)
    return PromptToMask(PromptEncoder(16, (4, 4), (64, 64), 8), decoder), (torch.randn(1, 16, 4, 4), points, labels), {}


# open_clip

IMAGES = {"layers": 2, "width": 16, "head_width": 8, "patch_size": 8, "image_size": 16}
TEXTS = {"context_length": 8, "vocab_size": WORDS, "width": 16, "heads": 2, "layers": 2}


class TextOnly(nn.Module):
    def __init__(self, clip):
        super().__init__()
        self.clip = clip

    def forward(self, texts):
        return self.clip.encode_text(texts, normalize=True)


@model_of("open_clip")
def clip():
    from open_clip import CLIP

    return CLIP(16, IMAGES, TEXTS), (image(16), tokens()), {}


@model_of("open_clip")
def clip_text():
    from open_clip import CLIP

    return TextOnly(CLIP(16, IMAGES, TEXTS)), (tokens(),), {}


@model_of("open_clip", verdict="note: output-alias")
def coca():
    """Its logits are for all words but the last, and their labels a view of the input."""
    from open_clip.coca_model import CoCa

    pooled = {"attentional_pool": True, "attn_pooler_heads": 2, "attn_pooler_queries": 8, "output_tokens": True}
    model = CoCa(16, TEXTS, {**TEXTS, "embed_cls": True, "output_tokens": True}, {**IMAGES, **pooled})
    nn.init.normal_(model.text_decoder.text_projection)  # the library leaves it as it was allocated
    return model, (image(16), tokens()), {}


# vit-pytorch

VIT = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 32}
VIT_PYTORCH = {
    "cait.CaiT": {**VIT, "cls_depth": 1},
    "cvt.CvT": {
        "num_classes": 10, "s1_emb_dim": 8, "s2_emb_dim": 8, "s3_emb_dim": 8, "s2_heads": 1, "s3_heads": 1,
        "s3_depth": 1,
    },
    "max_vit.MaxViT": {"num_classes": 10, "dim_conv_stem": 8, "dim": 8, "dim_head": 4, "depth": (1,), "window_size": 4},
    "mobile_vit.MobileViT": {"image_size": (64, 64), "dims": [8, 8, 8], "channels": [4] * 11, "num_classes": 10},
    "t2t.T2TViT": {
        "dim": 16, "image_size": 32, "num_classes": 10, "depth": 2, "heads": 2, "mlp_dim": 32,
        "t2t_layers": ((7, 4), (3, 2)),
    },
    "vit_with_patch_merger.ViT": {**VIT, "depth": 3, "patch_merge_layer": 1, "patch_merge_num_tokens": 4},
}  # fmt: skip


def of_vit_pytorch(name, sizes):
    module, _, cls = name.partition(".")
    size = 64 if module == "mobile_vit" else 32
    return getattr(importlib.import_module(f"vit_pytorch.{module}"), cls)(**sizes), (image(size),), {}


for name, sizes in VIT_PYTORCH.items():
    model_of("vit_pytorch", name)(lambda name=name, sizes=sizes: of_vit_pytorch(name, sizes))


@model_of(
    "vit_pytorch",
    verdict="warning: host-data",
    on_cuda="audit: host-data",
    line="self.pos_embedding.to(device, dtype=x.dtype)",
)
def simple_vit():
    """Its positions are a plain attribute, which stays on the host when the model is moved."""
    return of_vit_pytorch("simple_vit.SimpleViT", VIT)


@model_of("vit_pytorch", verdict="audit: dynamic-shape", line="torch.unique(t, sorted = True)")
def adaptive_token_sampling():
    return of_vit_pytorch("ats_vit.ViT", {**VIT, "max_tokens_per_depth": (8, 4)})


# Segmentation Models and MONAI


def of_smp(name, encoder):
    import segmentation_models_pytorch

    return getattr(segmentation_models_pytorch, name)(encoder, encoder_weights=None, classes=3), (image(),), {}


model_of("segmentation_models_pytorch", "unet")(lambda: of_smp("Unet", "resnet18"))
model_of("segmentation_models_pytorch", "segformer")(lambda: of_smp("Segformer", "mit_b0"))


@model_of("monai")
def unet_of_volumes():
    from monai.networks.nets import UNet

    return UNet(3, 1, 2, (4, 8), (2,)), (torch.randn(ROWS, 1, 8, 8, 8),), {}


@model_of("monai")
def unetr():
    from monai.networks.nets import UNETR

    sizes = {"feature_size": 4, "hidden_size": 16, "mlp_dim": 32, "num_heads": 2, "spatial_dims": 2}
    return UNETR(1, 2, (32, 32), **sizes), (image(32, 1),), {}


@model_of("monai")
def swin_unetr():
    from monai.networks.nets import SwinUNETR

    sizes = {"feature_size": 12, "spatial_dims": 2, "depths": (1, 1, 1, 1), "num_heads": (2, 2, 2, 2)}
    return SwinUNETR(1, 2, **sizes), (image(64, 1),), {}


@model_of("monai", verdict="note: stateful-python")
def vqvae():
    """It keeps the perplexity of the last call."""
    from monai.networks.nets import VQVAE

    down, up = ((2, 4, 1, 1),) * 2, ((2, 4, 1, 1, 0),) * 2
    sizes = {"num_res_channels": (8, 8), "num_res_layers": 1, "num_embeddings": 8, "embedding_dim": 8}
    model = VQVAE(2, 1, 1, (8, 8), downsample_parameters=down, upsample_parameters=up, **sizes)
    return model, (image(16, 1),), {}


# ultralytics


def of_ultralytics(name, cls="DetectionModel"):
    import ultralytics.nn.tasks

    return getattr(ultralytics.nn.tasks, cls)(f"{name}.yaml", ch=3, nc=3, verbose=False), (image(64),), {}


model_of("ultralytics", "yolov8")(lambda: of_ultralytics("yolov8n"))
model_of("ultralytics", "yolo11")(lambda: of_ultralytics("yolo11n"))
model_of("ultralytics", "yolov8 for classes")(lambda: of_ultralytics("yolov8n-cls", "ClassificationModel"))


@model_of("ultralytics", verdict="audit: host-data", line="features[batch_ind, topk_ind]")
def rtdetr():
    return of_ultralytics("yolov8-rtdetr", "RTDETRDetectionModel")
