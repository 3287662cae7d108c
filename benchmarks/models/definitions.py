"""Models with random weights: tensors in by position, one tensor out. Two of their parts serve ``test_models.py``."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

BATCH_SIZES = (1, 2, 4, 8, 32, 96)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large the models are: as they are served, or as small as a rehearsal can bear."""

    tiny: bool
    device: str

    def pick(self, full: Any, tiny: Any) -> Any:
        return tiny if self.tiny else full

    @property
    def half(self) -> torch.dtype:
        """What large models are served in; a CPU has no fast kernels for it."""
        return torch.float32 if self.tiny else torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model with inputs of one batch size."""

    model: nn.Module
    args: tuple[torch.Tensor, ...]
    dtype: str

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


Build = Callable[[Scale, int], Subject]


def _subject(model: nn.Module, args: tuple[torch.Tensor, ...], scale: Scale, dtype: torch.dtype) -> Subject:
    placed = model.to(scale.device, dtype).eval().requires_grad_(False)
    moved = tuple(each.to(scale.device, dtype if each.is_floating_point() else None) for each in args)
    return Subject(model=placed, args=moved, dtype=str(dtype).removeprefix("torch."))


def classifier(scale: Scale, batch_size: int) -> Subject:
    """Three linear layers, 784 features."""
    width = scale.pick(512, 32)
    layers = [nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    return _subject(nn.Sequential(*layers), (torch.randn(batch_size, 784),), scale, torch.float32)


def encoder(scale: Scale, batch_size: int) -> Subject:
    """Six layers of 512 features on 64 positions."""
    width = scale.pick(512, 32)
    layer = nn.TransformerEncoderLayer(
        d_model=width, nhead=scale.pick(8, 2), dim_feedforward=4 * width, batch_first=True
    )
    # Nested tensors read the padding mask on the host, which no capture allows.
    model = nn.TransformerEncoder(layer, num_layers=scale.pick(6, 2), enable_nested_tensor=False)
    return _subject(model, (torch.randn(batch_size, scale.pick(64, 8), width),), scale, scale.half)


def cnn(scale: Scale, batch_size: int) -> Subject:
    """Four convolutions with batch normalisation on 32 by 32 pixels."""
    widths = [3, *(scale.pick(64, 4) * factor for factor in (1, 1, 2, 2))]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10)]
    return _subject(nn.Sequential(*layers), (torch.randn(batch_size, 3, 32, 32),), scale, torch.float32)


class _Bottleneck(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.body(x) + self.shortcut(x)).relu()


def resnet50(scale: Scale, batch_size: int) -> Subject:
    """Bottlenecks 3, 4, 6, 3 (He et al. 2015, table 1) on 224 by 224 pixels."""
    stem = scale.pick(64, 4)
    layers: list[nn.Module] = [nn.Conv2d(3, stem, 7, 2, 3, bias=False), nn.BatchNorm2d(stem), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    before = stem
    for stage, blocks in enumerate(scale.pick((3, 4, 6, 3), (1, 1))):
        for block in range(blocks):
            width = stem * 2**stage
            layers.append(_Bottleneck(before, width, 2 if stage and not block else 1))
            before = 4 * width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, scale.pick(1000, 10))]
    side = scale.pick(224, 32)
    return _subject(nn.Sequential(*layers), (torch.randn(batch_size, 3, side, side),), scale, scale.half)


class Part(nn.Module):
    """One field of what a transformers model returns."""

    def __init__(self, model: nn.Module, field: str, **fixed: Any) -> None:
        super().__init__()
        self.model, self.field, self.fixed = model, field, fixed

    def forward(self, tokens: torch.Tensor) -> Any:
        return getattr(self.model(tokens, **self.fixed), self.field)


def gpt2(scale: Scale, batch_size: int) -> Subject:
    """GPT-2 (124 M parameters) on a prompt of 64 tokens."""
    import transformers

    sizes = scale.pick({}, {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64})
    config = transformers.GPT2Config(**sizes)
    tokens = torch.randint(0, config.vocab_size, (batch_size, scale.pick(64, 8)))
    model = Part(transformers.GPT2LMHeadModel(config), "logits", use_cache=False)
    return _subject(model, (tokens,), scale, scale.half)


def bert(scale: Scale, batch_size: int) -> Subject:
    """BERT base on 128 tokens."""
    import transformers

    tiny = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(**scale.pick({}, {**tiny, "intermediate_size": 64}))
    tokens = torch.randint(0, config.vocab_size, (batch_size, scale.pick(128, 8)))
    return _subject(Part(transformers.BertModel(config), "last_hidden_state"), (tokens,), scale, scale.half)


def vit(scale: Scale, batch_size: int) -> Subject:
    """ViT base, 16 by 16 patches of 224 by 224 pixels."""
    import transformers

    tiny = {"image_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.ViTConfig(**scale.pick({}, {**tiny, "intermediate_size": 64}))
    pixels = torch.randn(batch_size, 3, config.image_size, config.image_size)
    return _subject(Part(transformers.ViTModel(config), "last_hidden_state"), (pixels,), scale, scale.half)


class DecodeStep(nn.Module):
    """One step of a Llama with a static cache that holds a prompt; every call moves the position on by one."""

    def __init__(self, config: Any, batch_size: int, device: str, dtype: torch.dtype) -> None:
        import transformers

        super().__init__()
        self.llama = transformers.LlamaForCausalLM(config).to(device, dtype).eval()
        self.cache = transformers.StaticCache(config=config, max_cache_len=256)
        prompt = torch.randint(0, config.vocab_size, (batch_size, 16), device=device)
        with torch.no_grad():
            self(prompt)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.llama(input_ids=tokens, past_key_values=self.cache, use_cache=True).logits


def llama_decode(scale: Scale, batch_size: int) -> Subject:
    """One decode step of a Llama of some 200 M parameters with a static cache."""
    import transformers

    tiny = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    full = {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12}
    config = transformers.LlamaConfig(
        **scale.pick(full, tiny),
        num_attention_heads=scale.pick(16, 4),
        num_key_value_heads=scale.pick(8, 2),
        max_position_embeddings=256,
    )
    tokens = torch.randint(0, 128, (batch_size, 1))
    return _subject(DecodeStep(config, batch_size, scale.device, scale.half), (tokens,), scale, scale.half)


MODELS: dict[str, Build] = {
    "classifier": classifier,
    "encoder": encoder,
    "cnn": cnn,
    "llama-decode": llama_decode,
    "gpt2": gpt2,
    "bert": bert,
    "vit": vit,
    "resnet50": resnet50,
}


def build(name: str, scale: Scale, batch_size: int) -> Subject:
    """One model with its inputs, made where it will run: a GPU draws weights in no time."""
    with torch.device(scale.device):
        return MODELS[name](scale, batch_size)
