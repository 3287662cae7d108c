"""Which exception ends a test, and how it reaches the test's own line."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from pytest_cudagraph import environment, errors
from pytest_cudagraph.errors import CudagraphError, EagerFailed, GraphTestFailure, InputError
from pytest_cudagraph.foreign import printable_lines

if TYPE_CHECKING:
    from pytest_cudagraph.values import GraphReport

P = ParamSpec("P")
T = TypeVar("T")


class ContextOfTest(Protocol):
    """What an exception on its way to the test needs of it."""

    def exclusive_call(self) -> AbstractContextManager[None]: ...

    def keep(self, report: GraphReport) -> None: ...

    def progress(self, line: str) -> None: ...


class HasContext(Protocol):
    """What a fixture gives to a test, and the context itself."""

    @property
    def context(self) -> ContextOfTest: ...


H = TypeVar("H", bound=HasContext)


def hide_plugin_frames(method: Callable[Concatenate[H, P], T]) -> Callable[Concatenate[H, P], T]:
    """Hide the plugin's frames between the test's line and the message, and keep the partial report for the summary.

    An exception of the model in eager mode is raised unchanged, so that a test can expect it. Its circumstances are
    added as notes. So is an exception that other code of the user raised, such as a ``__repr__``. Any other exception
    is an error of the plugin and keeps its frames.
    """

    @functools.wraps(method)
    def call(holder: H, /, *args: P.args, **kwargs: P.kwargs) -> T:
        __tracebackhide__ = True
        context = holder.context
        try:
            environment.require_torch()
            with context.exclusive_call():
                return method(holder, *args, **kwargs)
        except GraphTestFailure as failure:
            if failure.report is not None:
                context.keep(failure.report)
            own = failure.own if isinstance(failure, EagerFailed) else None
            if own is None:
                raise failure.with_traceback(None) from failure.__cause__
            _, *notes = str(failure).splitlines()
            own.__notes__ = [*getattr(own, "__notes__", ()), *(f"cudagraph: {note.strip()}" for note in notes)]
        except CudagraphError as mistake:
            if mistake.report is not None:
                context.keep(mistake.report)
            raise mistake.with_traceback(None) from mistake.__cause__
        except Exception as error:
            if not _begin_at_user(error):
                raise
            own = error
        finally:
            context.progress("")
        # Outside the handler, so that its context and cause do not change.
        raise own

    return call


def _begin_at_user(error: Exception) -> bool:
    """Let the traceback begin at the user's first line below the plugin. False where no code of the user raised."""
    from pytest_cudagraph import sources

    site = sources.raised_in_user_code(error)
    if site is None:
        return False
    error.__traceback__ = site
    if error.__context__ is not None and sources.raised_in_user_code(error.__context__) is None:
        # What the plugin was doing when the user's code was called.
        error.__suppress_context__ = True
    return True


@contextmanager
def exclusive_call(lock: Any) -> Iterator[None]:
    """Hold the lock; :class:`InputError` where another thread holds it. Both would capture and measure at once."""
    __tracebackhide__ = True
    if not lock.acquire(blocking=False):
        raise InputError(
            "one thread at a time can use these fixtures; found a call while another thread's is under way: each would "
            "be in the other's capture, random numbers and timings; call them one after the other"
        )
    try:
        yield
    finally:
        lock.release()


def depth_of_test() -> int:
    """The stack level of the first caller outside this package: a warning there names the test's line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("pytest_cudagraph."):
        frame, level = frame.f_back, level + 1
    return level


_FAILURES: dict[str, type[errors.GraphTestFailure]] = {
    "eager": errors.EagerFailed,
    "audit": errors.AuditFailed,
    "compile": errors.CompileFailed,
    "capture": errors.CaptureFailed,
    "check": errors.ReplayMismatch,
    "speedup": errors.SpeedupTooLow,
    "over-compiled": errors.SpeedupTooLow,
    "baseline": errors.SlowerThanBaseline,
    "structure": errors.TooManyKernels,
}


def outcome_of(
    report: GraphReport, *, is_strict: bool, added: Iterable[Mapping[str, type[GraphTestFailure]]] = ()
) -> errors.GraphTestFailure | errors.InconclusiveWarning | None:
    """The exception or the warning that a report ends its test with. None where the test passes silently.

    A failing verdict raises the error of the first gate that has it; ``added`` are those of features by their gates.
    Under ``--cudagraph-strict`` every other verdict but passed raises too. Without it an inconclusive verdict is a
    warning.
    """
    from pytest_cudagraph.report import failure_text
    from pytest_cudagraph.values import Verdict

    verdict = report.verdict
    if verdict.fails:
        judgements = [*report.judgements, *(each for batch in report.batches for each in batch.judgements)]
        worst = next(each for each in judgements if each.verdict is verdict)
        failures = {gate: failure for each in (*added, _FAILURES) for gate, failure in each.items()}
        return failures.get(worst.gate, GraphTestFailure)(failure_text(report), report)
    if is_strict and verdict is not Verdict.PASSED:
        return errors.NotProven(failure_text(report), report)
    inconclusive = verdict is Verdict.INCONCLUSIVE
    return errors.InconclusiveWarning(printable_lines(failure_text(report))) if inconclusive else None
