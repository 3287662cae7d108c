"""Turns errors of torch and CUDA at capture into refusals, with the hazard's id and the user's line."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pytest_cudagraph import hazards
from pytest_cudagraph.backends.capture_mode import ObservingMode, hidden_from_compiler
from pytest_cudagraph.backends.cuda.gpu import ENDS_ELSEWHERE
from pytest_cudagraph.errors import CaptureRefusal
from pytest_cudagraph.hazards import refusal
from pytest_cudagraph.sources import user_site, user_site_of
from pytest_cudagraph.values import Site

STRAYED = "another-stream"
"""In place of a hazard's id: the operation is legal, but it runs on another stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The first operation of a call that a capture refuses."""

    hazard: str
    operation: str
    site: Site | None


def diagnose(
    call: Callable[[], object], stream_now: Callable[[], Any], at: Site | None = None
) -> Diagnosis | None:  # fmt: skip
    """Run ``call`` eagerly and name its first refused operation, of the line ``at`` if one is given.

    Return None if no rule refuses any. An operation on another stream than the first one counts as refused
    (``stream_now`` returns the stream): CUDA complains about such work only at the end of a capture. Changes state as
    any call does.
    """
    refusals = hidden_from_compiler(_FirstRefusal)(stream_now, at)
    # The refusal of the capture is already known. An error of this run must not hide it.
    with contextlib.suppress(Exception), refusals:
        call()
    return refusals.found


class _FirstRefusal(ObservingMode):
    def __init__(self, stream_now: Callable[[], Any], at: Site | None) -> None:
        super().__init__()
        self.found: Diagnosis | None = None
        self._stream_now, self._stream, self._at = stream_now, stream_now(), at

    def observe(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.found is None:
            refused = self._refused(func, args, kwargs)
            self.found = refused if refused and self._at in (None, refused.site) else None
        return func(*args, **kwargs)

    def _refused(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Diagnosis | None:
        refused = refusal(func, args, kwargs)
        if refused is not None:
            return Diagnosis(hazard=refused.id, operation=refused.operation, site=user_site())
        if self._stream_now() == self._stream:
            return None
        return Diagnosis(hazard=STRAYED, operation=str(getattr(func, "overloadpacket", func)), site=user_site())


_CUDA_PREFIXES = ("CUDA error: ", "CUDA driver error: ", "HIP error: ")

_OTHER = "unknown-op"
_OTHER_STREAM_FIX = (
    "let the other stream wait for the current one before its work, and the current one for it afterwards "
    "(wait_stream both ways); make streams and what runs on them outside of the call"
)
# CUDA refuses in the same words a wait for the device and new memory for a stream that does not capture.
_UNSUPPORTED_FIX = (
    "if this line waits for the device, keep its value on the device or take it out of the call; "
    f"if it works on another stream, {_OTHER_STREAM_FIX}"
)
_EMPTY_FIX = "give the fixture a callable that computes on its inputs with torch"
_PACKAGE_FIX = (
    "load the package with torch._inductor.aoti_load_package(path, run_single_threaded=True); "
    "if it was, the model in it waits for the device"
)


class _Known(NamedTuple):
    """A text of torch or CUDA, the hazard it means, and a remedy if the catalogue's is too general."""

    text: str
    hazard: str
    fix: str = ""


# Torch raises it for copies in either direction.
_UNPINNED_COPY = "Cannot copy between CPU and CUDA tensors during CUDA graph capture"

# Torch 2.13's allocator asserts this at the first allocation after a refusal.
_INVALIDATED_ASSERTION = "info.status != cudaStreamCaptureStatusInvalidated"

# The first text found decides. The texts are from torch's sources and NVIDIA's list of errors.
_TEXTS = (
    _Known(_UNPINNED_COPY, "host-data"),
    _Known(hazards.NESTED_REPLAY_TEXT, "nested-graph"),
    _Known("generator not in capture mode", "rng"),
    _Known("CUDAGeneratorImpl", "rng"),
    _Known("Offset increment outside graph capture", "rng"),
    _Known("RNG op during graph capture", "rng"),
    _Known("The CUDA Graph is empty", "", _EMPTY_FIX),
    _Known("Expected all tensors to be on the same device", "foreign-tensor"),
    _Known(hazards.CAPTURE_UNSUPPORTED.text, "host-sync", _UNSUPPORTED_FIX),
    # 902, 904 to 907 of cudaError_t
    _Known("merge of separate capture sequences", _OTHER, _OTHER_STREAM_FIX),
    _Known(hazards.CAPTURE_UNJOINED.text, _OTHER, _OTHER_STREAM_FIX),
    _Known(hazards.CAPTURE_ISOLATION.text, _OTHER, _OTHER_STREAM_FIX),
    _Known(hazards.CAPTURE_IMPLICIT.text, _OTHER, _OTHER_STREAM_FIX),
    _Known("event last recorded in a capturing stream", _OTHER, _OTHER_STREAM_FIX),
    _Known(ENDS_ELSEWHERE, _OTHER, _OTHER_STREAM_FIX),
)

_ECHOES = (
    hazards.CAPTURE_INVALIDATED.text,
    hazards.CAPTURE_UNJOINED.text,
    hazards.CAPTURE_ISOLATION.text,
    hazards.CAPTURE_IMPLICIT.text,
    ENDS_ELSEWHERE,
    _INVALIDATED_ASSERTION,
)
"""Errors of the capture as a whole, or of operations after the one that invalidated it."""


def diagnosis_of(
    error: BaseException, call: Callable[[], object], stream_now: Callable[[], Any]
) -> Diagnosis | None:  # fmt: skip
    """Find the refused operation with :func:`diagnose`, if the text of ``error`` does not name it."""
    if _is_echo(error):
        return diagnose(call, stream_now)
    is_unspecific = any(text in str(error) for text in (hazards.CAPTURE_UNSUPPORTED.text, _UNPINNED_COPY))
    return diagnose(call, stream_now, user_site_of(error)) if is_unspecific else None


def refusal_of(error: BaseException, diagnosis: Diagnosis | None = None) -> CaptureRefusal:
    """The refusal for ``error``. ``diagnosis`` names the operation where CUDA does not."""
    known = next((each for each in _TEXTS if each.text in str(error)), _Known("", _OTHER))
    if _is_threaded_package(error) and (hazards.CAPTURE_UNSUPPORTED.text in str(error) or _is_echo(error)):
        return CaptureRefusal(text_of(error), site=user_site_of(error), fix=_PACKAGE_FIX)
    hazard, fix, operation = known.hazard, known.fix, ""
    if diagnosis is not None:
        strayed = diagnosis.hazard == STRAYED
        hazard, operation = (_OTHER if strayed else diagnosis.hazard), diagnosis.operation
        fix = _OTHER_STREAM_FIX if strayed else ""
    site = user_site_of(error)
    # A later operation raises an echo. The user must look at the operation refused first.
    if diagnosis and (site is None or _is_echo(error)):
        site = diagnosis.site
    return CaptureRefusal(text_of(error), hazard=hazard, operation=operation, site=site, fix=fix)


def text_of(error: BaseException) -> str:
    """The first line of the error without torch's advice on debugging, and other errors with their class."""
    lines = str(error).strip().splitlines()
    first = lines[0].partition(" (Triggered internally")[0] if lines else ""
    if _INVALIDATED_ASSERTION in first:
        return hazards.CAPTURE_INVALIDATED.text
    for prefix in _CUDA_PREFIXES:
        if first.startswith(prefix):
            return first.removeprefix(prefix)
    if isinstance(error, RuntimeError | Warning) and first:
        return first
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _is_echo(error: BaseException) -> bool:
    return any(text in str(error) for text in _ECHOES)


def _is_threaded_package(error: BaseException) -> bool:
    """Whether the error is from an AOTInductor package, whose container queries events for its threads by default."""
    owners = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(type(owner).__name__ == "AOTICompiledModel" for owner in owners)
