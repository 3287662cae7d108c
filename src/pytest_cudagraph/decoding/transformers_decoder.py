"""Models of transformers as decoders, with their static cache."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from pytest_cudagraph.backends.buffers import describe
from pytest_cudagraph.errors import InputError


class StaticDecoder(nn.Module):
    """See :class:`~pytest_cudagraph.decoding.decoder.Decoder`. Each number of rows has a cache of its own."""

    def __init__(self, model: Any, length: int, logits_to_keep: int, cache_class: Any) -> None:
        super().__init__()
        self.model, self.length = model, length
        self._logits_to_keep, self._cache_class = logits_to_keep, cache_class
        self._config = model.config.get_text_config(decoder=True)
        self._caches: dict[int, Any] = {}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append tokens (rows, n). Return the logits of the last ``logits_to_keep`` of them."""
        rows = tokens.shape[0]
        if rows not in self._caches:
            self._caches[rows] = self._new_cache(rows)
        return self._logits(tokens, self._caches[rows])

    def _logits(self, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        output = self.model(
            input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=self._logits_to_keep
        )
        logits: torch.Tensor = output.logits
        return logits

    def _new_cache(self, rows: int) -> Any:
        # A sliding layer keeps its position in a Python number. A full one has room for every token, and the model
        # masks those outside of its window all the same.
        config = copy.deepcopy(self._config)
        config.sliding_window = None
        if getattr(config, "layer_types", None):
            config.layer_types = ["full_attention"] * len(config.layer_types)
        cache: Any = self._cache_class(config=config, max_cache_len=self.length)
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


class EncoderDecoder(StaticDecoder):
    """The decoder of an encoder-decoder model. It attends to the encoder's states, whose keys are computed once."""

    def __init__(self, model: Any, length: int, logits_to_keep: int, caches: tuple[Any, Any], states: Any) -> None:
        super().__init__(model, length, logits_to_keep, caches[0])
        self._pair_class = caches[1]
        # T5's own configuration counts the layers of its encoder.
        self._config = model.get_decoder().config.get_text_config(decoder=True)
        self.encoder_states = nn.Buffer(states.clone())
        # Without a mask, Bart makes one as long as the tokens so far.
        self._mask = nn.Buffer(torch.ones(states.shape[0], length, dtype=torch.int64, device=states.device))

    def attend_to(self, encoder_states: torch.Tensor) -> None:
        """Attend to other encoder states of the same shape, from the next generation on."""
        if encoder_states.shape != self.encoder_states.shape:
            found, allowed = tuple(encoder_states.shape), tuple(self.encoder_states.shape)
            raise InputError(f"graphs read encoder states of one shape, {allowed}; found {found}")
        with torch.inference_mode():
            self.encoder_states.copy_(encoder_states)
            for rows, cache in self._caches.items():
                self._fill(cache, rows)

    def _logits(self, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        states = self.encoder_states[: tokens.shape[0]]
        output = self.model(
            decoder_input_ids=tokens,
            decoder_attention_mask=self._mask[: tokens.shape[0]],
            encoder_outputs=(states,),
            past_key_values=cache,
            use_cache=True,
        )
        logits: torch.Tensor = output.logits[:, -self._logits_to_keep :]
        return logits

    def _new_cache(self, rows: int) -> Any:
        most, length, _ = self.encoder_states.shape
        if rows > most:
            raise InputError(f"encoder_states has {most} rows; the decoder was called with {rows}")
        cross = self._cache_class(config=self._config, max_cache_len=length)
        cache = self._pair_class(super()._new_cache(rows), cross)
        self._fill(cache, rows)
        return cache

    def _fill(self, cache: Any, rows: int) -> None:
        """Write the keys and values of the encoder's states, by a call for one token that is forgotten."""
        for number, layer in enumerate(cache.cross_attention_cache.layers):
            layer.cumulative_length.zero_()
            cache.is_updated[number] = False
        self._logits(torch.zeros(rows, 1, dtype=torch.int64, device=self.encoder_states.device), cache)
        for layer in cache.self_attention_cache.layers:
            layer.cumulative_length.zero_()

    def _layers(self) -> list[Any]:
        return [layer for cache in self._caches.values() for layer in cache.self_attention_cache.layers]


def static_decoder(
    model: Any, max_length: int, *, logits_to_keep: int = 1, encoder_states: torch.Tensor | None = None
) -> StaticDecoder:
    """A language model of transformers as a :class:`~pytest_cudagraph.decoding.decoder.Decoder`.

    ``model`` is one like ``LlamaForCausalLM``, in evaluation mode. ``max_length`` is the most tokens of a prompt and
    its continuation. Calls return the logits of the last ``logits_to_keep`` tokens: prompt lookup needs k + 1.

    A model like ``T5ForConditionalGeneration`` needs ``encoder_states``, the encoder's last hidden states (rows,
    source length, width), of which row n is for row n of the tokens. ``attend_to`` of the result replaces their values.

    Raises :class:`~pytest_cudagraph.errors.InputError` without transformers, for another kind of model, and for a
    length that the model was not made for.
    """
    try:
        from transformers import EncoderDecoderCache, StaticCache
    except ImportError as missing:
        raise InputError("static_decoder needs transformers: pip install 'pytest-cudagraph[generation]'") from missing
    _check_model(model, max_length)
    if not getattr(model.config, "is_encoder_decoder", False):
        if encoder_states is not None:
            raise InputError(f"encoder_states is for encoder-decoder models; {type(model).__name__} is none")
        return StaticDecoder(model, max_length, logits_to_keep, StaticCache)
    if not isinstance(encoder_states, torch.Tensor) or encoder_states.ndim != 3:
        raise InputError(
            f"an encoder-decoder model needs encoder_states, a tensor (rows, source length, width); "
            f"found {describe(encoder_states)}: model.get_encoder()(input_ids).last_hidden_state"
        )
    return EncoderDecoder(model, max_length, logits_to_keep, (StaticCache, EncoderDecoderCache), encoder_states)


def _check_model(model: Any, max_length: int) -> None:
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config") or not callable(model) or isinstance(model, type):
        raise InputError(f"static_decoder takes a language model of transformers; found {type(model).__name__}")
    if model.training:
        raise InputError("a decoder is deterministic; found a model in training mode: call model.eval()")
    own = config.get_text_config(decoder=True)
    most = getattr(own, "max_position_embeddings", getattr(own, "max_target_positions", None))
    if most is not None and max_length > most:
        raise InputError(f"this model was made for {most} positions; found max_length={max_length}")
