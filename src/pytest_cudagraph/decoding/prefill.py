"""A prompt prefilled in chunks, beside one call: the same logits and cache, and how many bytes less."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import torch

from pytest_cudagraph import pytree, state
from pytest_cudagraph.backends.capture_mode import ObservingMode, claims_capture, replaced
from pytest_cudagraph.backends.cpu.operators import traits_of
from pytest_cudagraph.check.compare import Tolerance
from pytest_cudagraph.decoding.agreement import judge_finite
from pytest_cudagraph.decoding.decoder import Decoder, check_members
from pytest_cudagraph.decoding.engine import parts
from pytest_cudagraph.decoding.logits import absolute_differences, not_finite_logits
from pytest_cudagraph.decoding.results import Counted, Prefill, PrefillBytes
from pytest_cudagraph.errors import InputError
from pytest_cudagraph.foreign import value_text
from pytest_cudagraph.units import bytes_text
from pytest_cudagraph.values import BatchReport, Judgement, Verdict


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
    tokens, other = _tokens(decoder, length, device)
    whole, chunked = (_run_after(other, decoder, tokens, chunk) for chunk in (None, request.chunk))
    not_finite = not_finite_logits(whole.values[0]) if whole.values else None
    pairs = () if not_finite else zip(whole.values, chunked.values, strict=True)
    largest = max(
        (_difference(*pair, tolerance) for pair in pairs),
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
        not_finite=not_finite.text if not_finite else "",
    )


def _tokens(decoder: Decoder, length: int, device: torch.device) -> torch.Tensor:
    """Two prompts of random token ids, (2, 1, length). The first call also makes a cache that a decoder makes late."""
    with torch.inference_mode():
        decoder.reset()
        vocabulary = decoder(torch.zeros(1, 1, dtype=torch.int64, device=device)).shape[-1]
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, vocabulary, (2, 1, length), generator=generator).to(device)


def _run_after(other: torch.Tensor, decoder: Decoder, tokens: torch.Tensor, chunk: int | None) -> _Run:
    """A prefill in a cache that holds the prompt ``other``, and so nothing that the prefill does not write itself."""
    if not tokens.is_meta:
        with torch.inference_mode():
            decoder.reset()
            decoder(other)
    return _run(decoder, tokens, chunk)


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


def judge_chunks(found: Prefill) -> Judgement | None:
    """Wrong if a prefill in chunks gives other logits or another cache than one call. None: ``meta`` has no values."""
    if found.not_finite:
        return judge_finite("the last token of one call", found.not_finite)
    if found.largest_difference is None or found.tolerance is None:
        return None
    chunks = f"chunks of {found.chunk} tokens"
    differ = f"logits and cache differ by at most {found.largest_difference:.3g}"
    if found.largest_difference <= found.tolerance:
        return Judgement(gate="tokens", verdict=Verdict.PASSED, reason=f"{chunks} give what one call gives: {differ}")
    return Judgement(
        gate="tokens",
        verdict=Verdict.WRONG,
        reason=f"{chunks} must give the logits and the cache of one call; they differ by "
        f"{found.largest_difference:.3g}, allowed are {found.tolerance:.3g}",
        remedy="fix: a call attends to what the cache holds before it; where the difference is rounding: rtol, atol",
    )


_ROUNDING = 100
"""A suggested limit has two decimals."""


def judge_bytes(found: Prefill, max_ratio: float | None) -> Judgement:
    """Failed if the chunked prefill takes more than ``max_ratio`` of the bytes of one call. None: only shown."""
    chunked, whole = (each.total(found.counting) for each in (found.chunked, found.whole))
    counted = f"{found.counting}: {bytes_text(chunked)} of {bytes_text(whole)}"
    reason = f"chunks of {found.chunk} take {found.bytes_ratio:.3f} of the bytes of one call ({counted})"
    parts = tuple(_bytes_line(*each) for each in (("one call", found.whole), ("chunks", found.chunked)))
    if max_ratio is None or found.bytes_ratio <= max_ratio:
        return Judgement(gate="bytes", verdict=Verdict.PASSED, reason=reason, evidence=parts)
    accept = math.ceil(found.bytes_ratio * _ROUNDING) / _ROUNDING
    return Judgement(
        gate="bytes",
        verdict=Verdict.FAILED,
        reason=f"{reason}; this test allows {max_ratio:g}",
        evidence=parts,
        remedy=f"to accept: max_bytes_ratio={accept:.2f}",
    )


def _bytes_line(what: str, found: PrefillBytes) -> str:
    activations, cache = bytes_text(found.activations_bytes), bytes_text(found.cache_bytes)
    return f"{what}: activations {activations}, cache {cache}, weights {bytes_text(found.weights_bytes)}"


class PeakBytes(ObservingMode):
    """Counts the bytes of the tensors that operations inside return, and the most that live at once.

    A tensor counts with the size of its storage until that is freed. Tensors that existed before do not count. What an
    operation uses inside (a workspace) is not seen.
    """

    def __init__(self, existing: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._existing = {_key(tensor): tensor.untyped_storage().nbytes() for tensor in existing}
        self._written: set[int] = set()
        self._read: set[int] = set()
        self._live: dict[int, int] = {}
        self._live_bytes = 0

    @property
    def written_bytes(self) -> int:
        """The storages that existed before and were written to."""
        return sum(self._existing[key] for key in self._written)

    @property
    def read_bytes(self) -> int:
        """The other storages that existed before and were read."""
        return sum(self._existing[key] for key in self._read - self._written)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        written = traits_of(func).written(args, kwargs)
        self._written |= {_key(tensor) for tensor in written} & self._existing.keys()
        self._read |= {_key(tensor) for tensor in pytree.tensors_in((args, kwargs))} & self._existing.keys()
        output = func(*args, **kwargs)
        for tensor in pytree.tensors_in(output):
            self._count(tensor.untyped_storage())
        return output

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size_bytes = storage._cdata, storage.nbytes()
        if key not in self._live and key not in self._existing:
            self._live[key] = size_bytes
            self._live_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self._live_bytes -= self._live.pop(key)


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
