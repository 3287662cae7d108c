"""The exceptions and warnings of this package.

::

    GraphTestFailure (AssertionError)     the verdict on a test, raised in its call phase
    ├── EagerFailed                       the model raises without any graph
    ├── AuditFailed                       a hazard makes the replay wrong or the capture impossible
    ├── CompileFailed                     the compile step raised or exceeded its time limit
    ├── CaptureFailed                     the capture was refused or fell back
    ├── ReplayMismatch                    replay differs from eager
    ├── SpeedupTooLow                     the ratio gate
    ├── SlowerThanBaseline                the latency gate
    ├── SlowerThanBase                    the latency gate against another revision (--cudagraph-base)
    ├── TooManyKernels                    the structure gate
    ├── ExpectationMissed                 calls of a monitor miss a limit of ``expect``
    └── NotProven                         inconclusive or not judged, with --cudagraph-strict
    CudagraphError (Exception)            wrong use, or a problem of the machine
    ├── InputError                        unusable example inputs
    ├── DeviceUnavailable                 the requested device is missing
    ├── BaselineError                     an unreadable or unwritable baseline file
    ├── RevisionError                     a revision that cannot be checked out or measured
    ├── DeadTensorError                   a replay would read freed memory
    ├── CompileTimeout                    inside compile: time limit exceeded, becomes CompileFailed
    └── CaptureRefusal                    inside backends: the reason of a refused capture, becomes CaptureFailed
    InconclusiveWarning (UserWarning)     the time budget ended before a decision

The module name of public classes is ``pytest_cudagraph``, so a traceback shows the name that a user imports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_cudagraph.foreign import first_line_of, message_of, printable_lines

if TYPE_CHECKING:
    from pytest_cudagraph.values import GraphReport, Site


class CudagraphError(Exception):
    """Wrong use, or a problem of the machine. The message says what is allowed, what was found, what to do."""

    report: GraphReport | None = None
    """The report until the error, if there is one."""

    def __init__(self, message: str = "") -> None:
        super().__init__(printable_lines(message))


class InputError(CudagraphError):
    """Unusable example inputs, outputs or arguments."""


class DeviceUnavailable(CudagraphError):
    """The requested device is missing."""


class BaselineError(CudagraphError):
    """An unreadable or unwritable baseline file. The message names the file, which stays unchanged."""


class RevisionError(CudagraphError):
    """A revision that cannot be checked out, or whose tests cannot be measured."""


class CaptureRefusal(CudagraphError):
    """A refused capture. ``text`` is the error text of CUDA, ``hazard`` the id in the catalogue.

    If no hazard of the model is the cause, ``hazard`` is empty and ``fix`` says what to do.
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
    """A replay would read memory that was freed or has moved since the capture. The replay did not run."""


class CompileTimeout(CudagraphError):
    """A compile that exceeded its time limit and was stopped."""


class GraphTestFailure(AssertionError):
    """The verdict on a failed test. ``report`` is the report that the fixture would have returned."""

    report: GraphReport | None

    def __init__(self, message: str, report: GraphReport | None = None) -> None:
        super().__init__(printable_lines(message))
        self.report = report


class EagerFailed(GraphTestFailure):
    """The model raises in eager mode. The cause is the model's own exception."""

    own: Exception | None = None
    """The exception of the model's first calls, without any graph. The fixtures raise it to the test unchanged."""


class AuditFailed(GraphTestFailure):
    """A hazard in the eager model makes the replay wrong or the capture impossible."""


class CompileFailed(GraphTestFailure):
    """The compile step raised or exceeded its time limit."""


class CaptureFailed(GraphTestFailure):
    """A graph could not be captured, or would not be used."""


class ReplayMismatch(GraphTestFailure):
    """Replay differs from eager. No timing is shown or saved."""


class SpeedupTooLow(GraphTestFailure):
    """The speedup of replay over eager is, with confidence, below the required minimum."""


class SlowerThanBaseline(GraphTestFailure):
    """Replay is slower than the saved baseline, beyond tolerance and noise."""


class SlowerThanBase(GraphTestFailure):
    """Replay is, with confidence, slower than in the revision of ``--cudagraph-base``."""


class TooManyKernels(GraphTestFailure):
    """The graph has more kernels than the baseline and the marker allow."""


class ExpectationMissed(GraphTestFailure):
    """The calls that a monitor recorded miss a limit of ``expect``."""


class NotProven(GraphTestFailure):
    """Nothing failed, but nothing is proved, and ``--cudagraph-strict`` requires proof."""


class InconclusiveWarning(UserWarning):
    """The time budget ended before the evidence decided between pass and fail."""


def first_line(exc: BaseException) -> str:
    """Name and first line of the exception inside PyTorch's wrappers: ``RuntimeError: no compiler found``."""
    inner = exc
    while isinstance(getattr(inner, "inner_exception", None), BaseException):
        inner = inner.inner_exception  # type: ignore[attr-defined]
    line, name = first_line_of(message_of(inner)), type(inner).__name__
    if not line:
        return name
    return line if line.startswith(name) else f"{name}: {line}"


for _public in (
    CudagraphError, InputError, DeviceUnavailable, BaselineError, RevisionError,
    CaptureRefusal, CompileTimeout, DeadTensorError,
    GraphTestFailure, EagerFailed, AuditFailed, CompileFailed, CaptureFailed, ReplayMismatch,
    SpeedupTooLow, SlowerThanBaseline, SlowerThanBase, TooManyKernels, ExpectationMissed,

    NotProven,
    InconclusiveWarning,
):  # fmt: skip
    _public.__module__ = "pytest_cudagraph"
