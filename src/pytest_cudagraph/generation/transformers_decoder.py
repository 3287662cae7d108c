"""A causal language model of transformers with its static cache, as a decoder."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from pytest_cudagraph.errors import InputError


class StaticDecoder(nn.Module):
    """See :class:`~pytest_cudagraph.generation.decoder.Decoder`. Each number of rows has a cache of its own."""

    def __init__(self, model: Any, length: int, logits_to_keep: int, cache_class: Any) -> None:
        super().__init__()
        self.model, self.length = model, length
        self._logits_to_keep, self._cache_class = logits_to_keep, cache_class
        self._caches: dict[int, Any] = {}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append tokens (rows, n). Return the logits of the last ``logits_to_keep`` of them."""
        cache = self._caches.get(tokens.shape[0])
        if cache is None:
            cache = self._caches[tokens.shape[0]] = self._new_cache()
        output = self.model(
            input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=self._logits_to_keep
        )
        logits: torch.Tensor = output.logits
        return logits

    def _new_cache(self) -> Any:
        # A sliding layer keeps its position in a Python number. A full one has room for every token, and the model
        # masks those outside of its window all the same.
        config = copy.deepcopy(self.model.config.get_text_config(decoder=True))
        config.sliding_window = None
        if getattr(config, "layer_types", None):
            config.layer_types = ["full_attention"] * len(config.layer_types)
        cache = self._cache_class(config=config, max_cache_len=self.length)
        for number, layer in enumerate(cache.layers):
            if not isinstance(getattr(layer, "cumulative_length", None), torch.Tensor):
                raise InputError(
                    f"static_decoder takes a cache whose layers keep their length in a tensor; layer {number} is a "
                    f"{type(layer).__name__} without one: transformers 5 has them"
                )
        return cache

    def reset(self) -> None:
        """Set the length of every cache to zero. Old keys and values stay, and are masked."""
        for layer in self._layers():
            layer.cumulative_length.zero_()

    def rewind(self, count: int) -> None:
        """Shorten every cache. Those of other numbers of rows are not read before the next :meth:`reset`."""
        for layer in self._layers():
            layer.cumulative_length.sub_(count)

    def _layers(self) -> list[Any]:
        return [layer for cache in self._caches.values() for layer in cache.layers]


def static_decoder(model: Any, max_length: int, *, logits_to_keep: int = 1) -> StaticDecoder:
    """A causal language model of transformers as a :class:`~pytest_cudagraph.generation.decoder.Decoder`.

    ``model`` is one like ``LlamaForCausalLM``, in evaluation mode. ``max_length`` is the most tokens of a prompt and
    its continuation. Calls return the logits of the last ``logits_to_keep`` tokens: prompt lookup needs k + 1.

    Raises :class:`~pytest_cudagraph.errors.InputError` without transformers, for another kind of model, and for a
    length that the model was not made for.
    """
    try:
        from transformers import StaticCache
    except ImportError as missing:
        raise InputError("static_decoder needs transformers: pip install 'pytest-cudagraph[generation]'") from missing
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config") or not callable(model) or isinstance(model, type):
        raise InputError(f"static_decoder takes a causal language model of transformers; found {type(model).__name__}")
    if model.training:
        raise InputError("a decoder is deterministic; found a model in training mode: call model.eval()")
    most = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if most is not None and max_length > most:
        raise InputError(f"this model was made for {most} positions; found max_length={max_length}")
    return StaticDecoder(model, max_length, logits_to_keep, StaticCache)
