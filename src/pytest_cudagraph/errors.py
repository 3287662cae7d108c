"""What can go wrong, as classes.

::

    GraphTestFailure (AssertionError)     a test's verdict: raised in its call phase, never caught by us
    ├── EagerFailed                       the model raises without any graph
    ├── AuditFailed                       a hazard makes the replay wrong or the capture impossible
    ├── CompileFailed                     the compile step raised, or ran past its time
    ├── CaptureFailed                     the capture was refused, or fell back
    ├── ReplayMismatch                    replay differs from eager
    ├── SpeedupTooLow                     the ratio gate
    ├── SlowerThanBaseline                the latency gate
    ├── SlowerThanBase                    the same gate against another revision (--cudagraph-base)
    ├── TooManyKernels                    the structure gate
    └── NotProven                         inconclusive or not judged, under --cudagraph-strict
    CudagraphError (Exception)            a mistake of use or of the machine
    ├── InputError                        example inputs that cannot be used as they are
    ├── DeviceUnavailable                 the device asked for is not there
    ├── BaselineError                     a baseline file that cannot be read or written
    ├── RevisionError                     a revision that cannot be checked out or measured
    ├── DeadTensorError                   a replay would read memory that is no longer there
    ├── CompileTimeout                    inside compile: past its time limit; becomes CompileFailed
    └── CaptureRefusal                    inside backends: why a capture cannot be; becomes CaptureFailed
    InconclusiveWarning (UserWarning)     the time budget ended before the evidence was enough
    FineGateWarning (UserWarning)         a gate finer than what the machine can tell

Public classes carry ``pytest_cudagraph`` as their module, so that a traceback shows the name a user imports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_cudagraph.values import GraphReport, Site


class CudagraphError(Exception):
    """A mistake of use or of the machine; the message says what is allowed, what was found, what to do."""

    report: GraphReport | None = None
    """The story until then, where one had begun."""


class InputError(CudagraphError):
    """Example inputs, outputs or arguments that cannot be used as they are."""


class DeviceUnavailable(CudagraphError):
    """The device asked for is not there."""


class BaselineError(CudagraphError):
    """A baseline file that cannot be read or written; the message names the file, which stays as it was."""


class RevisionError(CudagraphError):
    """A revision that cannot be checked out, or whose tests cannot be measured."""


class CaptureRefusal(CudagraphError):
    """A capture that cannot be. ``text`` is what CUDA says in this case, ``hazard`` the id in the catalogue.

    Where no hazard of the model is the cause, ``hazard`` is empty and ``fix`` says what to do.
    """

    def __init__(
        self, text: str, *, hazard: str = "", operation: str = "", site: Site | None = None, fix: str = ""
    ) -> None:
        self.text = text
        self.hazard = hazard
        self.fix = fix
        self.operation = operation
        self.site = site
        place = f" at {site}" if site else ""
        super().__init__(f"{text}{f' ({operation})' if operation else ''}{place}")


class DeadTensorError(CudagraphError):
    """A replay would read memory of its capture that has been freed or has moved; nothing was run."""


class CompileTimeout(CudagraphError):
    """A compile that ran past its time limit and was stopped."""


class GraphTestFailure(AssertionError):
    """A test's verdict. ``report`` is the whole story, as the fixture would have returned it."""

    report: GraphReport | None

    def __init__(self, message: str, report: GraphReport | None = None) -> None:
        super().__init__(message)
        self.report = report


class EagerFailed(GraphTestFailure):
    """The model raises in eager mode; the cause is the model's own exception."""

    own: Exception | None = None
    """What the model raised in its first calls, without any graph: the fixtures let a test hear that itself."""


class AuditFailed(GraphTestFailure):
    """The eager model holds a hazard that makes replays wrong or captures impossible."""


class CompileFailed(GraphTestFailure):
    """The compile step raised, or ran past its time limit."""


class CaptureFailed(GraphTestFailure):
    """A graph could not be captured, or would not be used."""


class ReplayMismatch(GraphTestFailure):
    """Replay computed something else than eager; no timing is shown or saved."""


class SpeedupTooLow(GraphTestFailure):
    """Replay is, with confidence, less than the asked-for factor faster than eager."""


class SlowerThanBaseline(GraphTestFailure):
    """Replay is, beyond tolerance and noise, slower than the saved baseline."""


class SlowerThanBase(GraphTestFailure):
    """Replay is, with confidence, slower than in the revision that ``--cudagraph-base`` names."""


class TooManyKernels(GraphTestFailure):
    """The graph holds more kernels than the baseline and the marker allow."""


class NotProven(GraphTestFailure):
    """Nothing is wrong, nothing is proved, and ``--cudagraph-strict`` asks for proof."""


class InconclusiveWarning(UserWarning):
    """The time budget ended before the evidence said pass or fail."""


class FineGateWarning(UserWarning):
    """A test asks for a gate that is finer than the noise of this machine."""


def first_line(exc: BaseException) -> str:
    """Name and first line of the exception inside PyTorch's wrappers: ``RuntimeError: no compiler found``."""
    inner = exc
    while isinstance(getattr(inner, "inner_exception", None), BaseException):
        inner = inner.inner_exception  # type: ignore[attr-defined]
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    name = type(inner).__name__
    if not lines:
        return name
    return lines[0] if lines[0].startswith(name) else f"{name}: {lines[0]}"


for _public in (
    CudagraphError, InputError, DeviceUnavailable, BaselineError, RevisionError,
    CaptureRefusal, CompileTimeout, DeadTensorError,
    GraphTestFailure, EagerFailed, AuditFailed, CompileFailed, CaptureFailed, ReplayMismatch,
    SpeedupTooLow, SlowerThanBaseline, SlowerThanBase, TooManyKernels, NotProven, InconclusiveWarning,
    FineGateWarning,
):  # fmt: skip
    _public.__module__ = "pytest_cudagraph"
