"""The interface of a decoder, and the calls that show whether an object keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from pytest_cudagraph import pytree, state
from pytest_cudagraph.backends.buffers import describe
from pytest_cudagraph.check.compare import Tolerance
from pytest_cudagraph.decoding.logits import logits_difference, not_finite_logits
from pytest_cudagraph.errors import InputError
from pytest_cudagraph.protocols import Backend
from pytest_cudagraph.units import first_of

DEFAULT_TOLERANCE = Tolerance()
_METHODS = ("__call__", "reset", "rewind")


@runtime_checkable
class Decoder(Protocol):
    """A language model with a cache of fixed length. Its position is a tensor on the device.

    A graph replays no Python. So a position in a Python number, or a cache that grows, is frozen by the capture.
    """

    length: int
    """The most tokens that the cache holds."""

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append tokens (rows, n), int64, to the cache. Return the logits of the last m, (rows, m, vocabulary).

        Rows are 1 to the decoder's most. A generation has the same rows from :meth:`reset` on.
        """
        ...

    def reset(self) -> None:
        """Forget all tokens. In place: graphs read the cache at its addresses."""
        ...

    def rewind(self, count: int) -> None:
        """Forget the last ``count`` tokens, in place."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderFacts:
    """What a decoder's logits show."""

    vocabulary: int
    dtype: torch.dtype


def check_decoder(decoder: Any, backend: Backend, rows: int, tolerance: Tolerance = DEFAULT_TOLERANCE) -> DecoderFacts:
    """Call a decoder a few times without a graph, and compare what it does with :class:`Decoder`.

    First two tokens, one more, that one again after ``rewind(1)``, and the two again after ``reset()``. Then several
    tokens in one call and one by one, and with other tokens in other rows. There shapes differ, and so do roundings:
    ``tolerance`` is that of :func:`~pytest_cudagraph.decoding.logits.logits_difference`. Raises
    :class:`~pytest_cudagraph.errors.InputError` for the first difference. The decoder is reset afterwards.
    """
    check_members(decoder)
    # Equal tokens would have equal values in the cache, and hide a wrong position.
    two = torch.tensor([[0, 1]], device=backend.device).expand(rows, 2).contiguous()
    one = two[:, :1].contiguous()
    _check_device(decoder, backend)
    with backend.running():
        decoder.reset()
        # Cloned: a decoder may return the same memory in each call.
        first = _checked_logits(_first_call(decoder, two), rows, 2).clone()
        addresses, generators = _addresses(decoder), backend.rng_state(decoder)
        second = _checked_logits(decoder(one), rows, 1).clone()
        if not pytree.has_same_tensors(generators, backend.rng_state(decoder)):
            raise InputError("the calls draw random numbers, so that no two of them are alike: call .eval()")
        _check_in_place(addresses, decoder, "a call")
        decoder.rewind(1)
        _check_same(second, decoder(one), "after rewind(1) the same token must give the same logits")
        decoder.reset()
        _check_same(first, decoder(two), "after reset() the same tokens must give the same logits")
        _check_in_place(addresses, decoder, "reset()")
        _check_consistency(decoder, _tokens(rows, first.shape[-1], backend.device), tolerance)
        decoder.reset()
    return DecoderFacts(vocabulary=first.shape[-1], dtype=first.dtype)


def _tokens(rows: int, vocabulary: int, device: str) -> torch.Tensor:
    """Token ids (rows, 4), other ones in each row and at each place as far as the vocabulary goes."""
    numbers = torch.arange(rows)[:, None] * 5 + torch.tensor([[1, 2, 4, 3]])
    return (numbers % vocabulary).to(device)


def _check_consistency(decoder: Decoder, tokens: torch.Tensor, tolerance: Tolerance) -> None:
    """Whether several tokens in one call are several calls, and whether a row depends on others."""
    decoder.reset()
    whole = decoder(tokens).clone()
    decoder.reset()
    steps = torch.cat([decoder(tokens[:, [at]]).clone() for at in range(tokens.shape[1])], 1)
    what = "several tokens in one call must give the logits of as many calls of one token: the cache, or the mask"
    _check_close(whole, steps[:, -whole.shape[1] :], tolerance, what)
    for changed in (0, -1) if len(tokens) > 1 else ():
        others = tokens.clone()
        others[changed] = tokens[changed].roll(1)
        decoder.reset()
        rows = slice(1, None) if changed == 0 else slice(None, -1)
        what = "a row must give the same logits whatever the other rows hold: blocks of the cache, or scales"
        _check_close(whole[rows], decoder(others)[rows], tolerance, what)


def _check_close(expected: torch.Tensor, found: torch.Tensor, tolerance: Tolerance, what: str) -> None:
    if not_finite_logits(expected):
        return  # the gate of finite logits tells it
    difference = logits_difference(expected, found, tolerance)
    if bool(difference.beyond.any()):
        raise InputError(
            f"{what}; found logits that differ by {difference.largest:.3g}, "
            f"allowed there are {difference.tolerance:.3g}; where that is rounding: rtol, atol"
        )


def _first_call(decoder: Decoder, tokens: torch.Tensor) -> Any:
    try:
        return decoder(tokens)
    # Whatever it raises is the decoder's own error. The number of rows is a frequent cause.
    except Exception as error:
        note = f"cudagraph: the decoder was called with {tokens.shape[0]} rows of 2 tokens: batch_sizes= gives the rows"
        error.__notes__ = [*getattr(error, "__notes__", ()), note]
        raise


def check_members(decoder: Any) -> None:
    """Raise :class:`~pytest_cudagraph.errors.InputError` for an object without the members of :class:`Decoder`."""
    missing = [name for name in _METHODS if not callable(getattr(decoder, name, None))]
    length = getattr(decoder, "length", None)
    if missing or isinstance(decoder, type):
        found = f"the class {decoder.__qualname__}" if isinstance(decoder, type) else type(decoder).__name__
        lacks = f", which lacks {', '.join(missing)}" if missing else ": make an object of it"
        raise InputError(f"a decoder has length, __call__(tokens), reset() and rewind(count); found {found}{lacks}")
    if isinstance(length, bool) or not isinstance(length, int) or length < 4:
        raise InputError(f"a decoder's length is a whole number of at least 4 tokens; found {length!r}")


def check_length(decoder: Decoder, prompt_length: int, count: int) -> None:
    """Raise :class:`~pytest_cudagraph.errors.InputError` if the cache is too short for a prompt and its new tokens."""
    needed = prompt_length + count - 1
    if needed > decoder.length:
        raise InputError(
            f"the decoder holds {decoder.length} tokens; a prompt of {prompt_length} and {count} new ones "
            f"need {needed}: a longer cache, a shorter prompt, or fewer tokens"
        )


def _checked_logits(logits: Any, rows: int, tokens: int) -> torch.Tensor:
    allowed = f"for {rows} x {tokens} tokens a decoder returns logits ({rows}, 1 to {tokens}, vocabulary)"
    if not isinstance(logits, torch.Tensor):
        raise InputError(f"{allowed}; found {type(logits).__name__}")
    shapes = logits.ndim == 3 and logits.shape[0] == rows and 1 <= logits.shape[1] <= tokens
    if not shapes or not logits.is_floating_point() or logits.shape[2] < 2:
        raise InputError(f"{allowed}; found {describe(logits)}")
    return logits


def _check_device(decoder: Any, backend: Backend) -> None:
    for name, tensor in state.live(decoder).items():
        # A 0-dim tensor on the host is used like a number.
        if tensor.device != torch.device(backend.device) and tensor.ndim:
            raise InputError(
                f"the decoder's tensors must be on {backend.device}, the device of this run; "
                f"{name} is {describe(tensor)}: make the decoder on decode_engine.device"
            )


def _addresses(decoder: Any) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in state.live(decoder).items()}


def _check_in_place(before: dict[str, int], decoder: Any, what: str) -> None:
    now = _addresses(decoder)
    moved = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if moved:
        raise InputError(
            "a decoder works in place, because graphs read its cache by address; "
            f"{what} replaced {first_of(moved, 1)}: "
            "write into the same tensors (zero_(), index_copy_(), sub_())"
        )


def _check_same(expected: torch.Tensor, found: torch.Tensor, allowed: str) -> None:
    try:
        torch.testing.assert_close(found, expected, equal_nan=True)
    except AssertionError:
        raise InputError(f"{allowed}; found others: {_largest(expected, found)}") from None


def _largest(expected: torch.Tensor, found: torch.Tensor) -> str:
    if found.shape != expected.shape:
        return f"{describe(found)} after {describe(expected)}"
    return f"the largest difference is {(found.double() - expected.double()).abs().max().item():.3g}"
