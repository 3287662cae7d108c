"""Errors of torch and CUDA at capture, to refusals with the hazard's id and the user's line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from torch.utils._python_dispatch import TorchDispatchMode

from pytest_cudagraph import hazards
from pytest_cudagraph.backends.cuda.gpu import ENDS_ELSEWHERE
from pytest_cudagraph.errors import CaptureRefusal
from pytest_cudagraph.hazards import refusal
from pytest_cudagraph.sources import user_site, user_site_of
from pytest_cudagraph.values import Site

STRAYED = "another-stream"
"""Stands in for the id of a hazard where an operation is legal, but not on the stream it runs on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The first operation of a call that a capture refuses, and the user's line."""

    hazard: str
    operation: str
    site: Site | None


def diagnose(call: Callable[[], object], stream_now: Callable[[], Any]) -> Diagnosis | None:
    """Run ``call`` eagerly and name its first refused operation; None when nothing known is refused.

    An operation that runs on another stream than the call began on (``stream_now`` tells) counts as refused: work that
    a capture does not join, or that waits for work outside of it, is told by CUDA only at the end. Changes state as
    any call does. An older torch cannot watch without switching compiled code off for good: where it has compiled
    anything, nothing is run.
    """
    if not hasattr(TorchDispatchMode, "ignore_compile_internals") and _has_compiled():
        return None
    watch = _FirstRefusal(stream_now)
    try:
        with watch:
            call()
    except Exception:
        # The call's own refusal is already being reported; what this run raises must not hide it.
        return watch.found
    return watch.found


def _has_compiled() -> bool:
    dynamo = sys.modules.get("torch._dynamo.utils")
    # A torch that counts in another way is taken to have compiled.
    return dynamo is not None and bool(getattr(dynamo, "counters", {"frames": True}).get("frames", {}))


class _FirstRefusal(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its hooks untyped
    def __init__(self, stream_now: Callable[[], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Diagnosis | None = None
        self._stream_now, self._stream = stream_now, stream_now()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Without this, one compiled call under the mode would stay eager for the rest of the process.
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self.found is None:
            self.found = self._judge(func, args, kwargs)
        return func(*args, **(kwargs or {}))

    def _judge(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Diagnosis | None:
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
_NESTED_FIX = "capture the whole call, or replay the inner graph outside of it: a graph holds no launch of another one"
_PACKAGE_FIX = (
    "load the package with torch._inductor.aoti_load_package(path, run_single_threaded=True); "
    "if it was, the model in it waits for the device"
)


class _Known(NamedTuple):
    """What torch or CUDA say, the hazard it means, and what to do where the catalogue would say too little."""

    text: str
    hazard: str
    fix: str = ""


# The first text found decides; each was read in torch's sources or in NVIDIA's list of errors.
_TEXTS = (
    _Known("Cannot copy between CPU and CUDA tensors during CUDA graph capture", "host-data"),
    _Known("Cannot prepare for replay during capturing stage", _OTHER, _NESTED_FIX),
    _Known("generator not in capture mode", "rng"),
    _Known("CUDAGeneratorImpl", "rng"),
    _Known("Offset increment outside graph capture", "rng"),
    _Known("Expected all tensors to be on the same device", "foreign-tensor"),
    _Known(hazards.CAPTURE_UNSUPPORTED.text, "host-sync"),
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
)
"""Said of the capture as a whole, or of whatever came after the operation that spoilt it."""


def is_unspecific(error: BaseException) -> bool:
    """Whether CUDA's text leaves open which operation was refused (error 900), or only echoes it (901 to 906)."""
    return hazards.CAPTURE_UNSUPPORTED.text in str(error) or _is_echo(error)


def refusal_of(error: BaseException, diagnosis: Diagnosis | None = None) -> CaptureRefusal:
    """The refusal that ``error`` amounts to; ``diagnosis`` names the operation where CUDA does not."""
    known = next((each for each in _TEXTS if each.text in str(error)), _Known("", _OTHER))
    if _is_threaded_package(error) and is_unspecific(error):
        return CaptureRefusal(text_of(error), site=user_site_of(error), fix=_PACKAGE_FIX)
    hazard, fix, operation = known.hazard, known.fix, ""
    if diagnosis is not None:
        strayed = diagnosis.hazard == STRAYED
        hazard, operation = (_OTHER if strayed else diagnosis.hazard), diagnosis.operation
        fix = _OTHER_STREAM_FIX if strayed else ""
    site = user_site_of(error)
    # An echo is raised by whatever comes next; the operation refused first is the one to look at.
    if diagnosis and (site is None or _is_echo(error)):
        site = diagnosis.site
    return CaptureRefusal(text_of(error), hazard=hazard, operation=operation, site=site, fix=fix)


def text_of(error: BaseException) -> str:
    """CUDA's own words: the first line, without torch's advice on debugging; foreign errors with their class."""
    lines = str(error).strip().splitlines()
    first = lines[0].partition(" (Triggered internally")[0] if lines else ""
    for prefix in _CUDA_PREFIXES:
        if first.startswith(prefix):
            return first.removeprefix(prefix)
    if isinstance(error, RuntimeError | Warning) and first:
        return first
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _is_echo(error: BaseException) -> bool:
    return any(text in str(error) for text in _ECHOES)


def _is_threaded_package(error: BaseException) -> bool:
    """Whether the error came out of a package of AOTInductor, whose container by default asks events for threads."""
    owners = (frame.f_locals.get("self") for frame in _frames(error.__traceback__))
    return any(type(owner).__name__ == "AOTICompiledModel" for owner in owners)


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next
