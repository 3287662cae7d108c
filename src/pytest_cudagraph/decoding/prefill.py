"""A prompt prefilled in chunks, beside one call: the same logits and cache, and how many bytes less."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch

from pytest_cudagraph import state
from pytest_cudagraph.backends.capture_mode import claims_capture, replaced
from pytest_cudagraph.check.compare import Tolerance
from pytest_cudagraph.decoding.agreement import absolute_differences
from pytest_cudagraph.decoding.decoder import Decoder, check_members
from pytest_cudagraph.decoding.engine import parts
from pytest_cudagraph.decoding.gates import judge_bytes, judge_chunks
from pytest_cudagraph.decoding.memory import PeakBytes
from pytest_cudagraph.decoding.results import Counted, Prefill, PrefillBytes
from pytest_cudagraph.errors import InputError
from pytest_cudagraph.foreign import value_text
from pytest_cudagraph.values import BatchReport


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRequest:
    """A prompt of ``length`` tokens in chunks of ``chunk``. Raises :class:`~pytest_cudagraph.errors.InputError`."""

    length: int
    chunk: int
    max_bytes_ratio: float | None
    """Of chunks over one call. None: the bytes are only shown."""
    counting: Counted

    def __post_init__(self) -> None:
        for name, value, most in (("length", self.length, math.inf), ("chunk", self.chunk, self.length)):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                bound = "" if most == math.inf else f" and at most the prompt's {most}"
                raise InputError(f"{name} is a number of tokens of at least 1{bound}; found {value_text(value)}")
        ratio = self.max_bytes_ratio
        if ratio is not None and (isinstance(ratio, bool) or not isinstance(ratio, int | float) or not ratio > 0):
            raise InputError(f"max_bytes_ratio is a number above 0; found {value_text(ratio)}")
        if self.counting not in get_args(Counted):
            raise InputError(f"counting is one of {', '.join(get_args(Counted))}; found {value_text(self.counting)}")


class _Run(NamedTuple):
    """One prefill: its bytes, and what it leaves behind."""

    bytes: PrefillBytes
    values: list[torch.Tensor]
    """The logits of the last token, and the decoder's own tensors without its parameters. Empty on ``meta``."""


def compare_prefill(decoder: Decoder, request: PrefillRequest, tolerance: Tolerance) -> Prefill:
    """Prefill one row of random tokens in one call, and in chunks.

    Chunks do not overlap: a token that is in the cache twice is attended to twice. Raises
    :class:`~pytest_cudagraph.errors.InputError` for lengths that the decoder cannot take.
    """
    check_members(decoder)
    length = request.length
    if length > decoder.length:
        raise InputError(f"the decoder holds {decoder.length} tokens; found a prompt of {length}")
    device = next((each.device for each in state.live(decoder).values() if each.ndim), torch.device("cpu"))
    tokens = _tokens(decoder, length, device)
    whole, chunked = _run(decoder, tokens, None), _run(decoder, tokens, request.chunk)
    largest = max(
        (_difference(*pair, tolerance) for pair in zip(whole.values, chunked.values, strict=True)),
        key=lambda found: found[0] - found[1],
        default=(None, None),
    )
    return Prefill(
        prompt_length=length,
        chunk=request.chunk,
        counting=request.counting,
        whole=whole.bytes,
        chunked=chunked.bytes,
        largest_difference=largest[0],
        tolerance=largest[1],
    )


def _tokens(decoder: Decoder, length: int, device: torch.device) -> torch.Tensor:
    """Random token ids. The first call also makes a cache that a decoder makes late."""
    with torch.inference_mode():
        decoder.reset()
        vocabulary = decoder(torch.zeros(1, 1, dtype=torch.int64, device=device)).shape[-1]
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, vocabulary, (1, length), generator=generator).to(device)


def prefill_bytes(decoder: Decoder, prompts: torch.Tensor) -> PrefillBytes:
    """The bytes of a prefill of prompts (rows, n) in one call, on any device."""
    return _run(decoder, prompts, None, keep=False).bytes


def _run(decoder: Decoder, tokens: torch.Tensor, chunk: int | None, *, keep: bool = True) -> _Run:
    # Transformers reads a value of its cache unless it is captured, and meta tensors have none. So there it builds the
    # mask that it would also build under capture.
    with torch.inference_mode(), replaced(claims_capture(lambda: tokens.is_meta)):
        decoder.reset()
        own = list(state.live(decoder).values())
        *first, last = parts(tokens, chunk)
        with PeakBytes(own) as counted:
            for part in first:
                decoder(part)  # its logits are not kept
            logits = decoder(last)
        keep = keep and not tokens.is_meta
        kept = [logits[:, -1:], *(each.clone() for each in own if _is_cache(each))] if keep else []
        decoder.reset()
    return _Run(
        PrefillBytes(
            activations_bytes=counted.peak_bytes, cache_bytes=counted.written_bytes, weights_bytes=counted.read_bytes
        ),
        kept,
    )


def _is_cache(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and not isinstance(tensor, torch.nn.Parameter)


def _difference(expected: torch.Tensor, found: torch.Tensor, tolerance: Tolerance) -> tuple[float, float]:
    """The largest difference, and what is allowed: ``atol + rtol * max |value|`` of the finite values."""
    rtol, atol = tolerance.of(expected.dtype)
    difference = absolute_differences(expected.double(), found.double()).nan_to_num(nan=torch.inf).max()
    sizes = expected.abs()
    return float(difference), atol + rtol * float(sizes.masked_fill(sizes.isinf(), 0.0).max())


def judge_prefill(found: Prefill, request: PrefillRequest) -> BatchReport:
    """The report of one prefill: first its values, then its bytes."""
    both = judge_chunks(found), judge_bytes(found, request.max_bytes_ratio)
    return BatchReport(batch_size=1, judgements=tuple(each for each in both if each is not None), scenario=found)
