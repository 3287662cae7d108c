"""Which exception ends a test, and how it reaches the test's own line."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from pytest_cudagraph import errors
from pytest_cudagraph.errors import CudagraphError, EagerFailed, GraphTestFailure, InputError

if TYPE_CHECKING:
    from pytest_cudagraph.session.context import FixtureContext
    from pytest_cudagraph.values import GraphReport

P = ParamSpec("P")
T = TypeVar("T")


def hide_plugin_frames(
    method: Callable[Concatenate[FixtureContext, P], T],
) -> Callable[Concatenate[FixtureContext, P], T]:
    """No frame of ours between the test's line and the message; the story told so far is kept for the end of the run.

    What a model raises without any graph is raised as it is, so that a test can expect it, with what is known of it as
    notes. Whatever else is raised is a mistake of ours and keeps its frames.
    """

    @functools.wraps(method)
    def call(context: FixtureContext, /, *args: P.args, **kwargs: P.kwargs) -> T:
        __tracebackhide__ = True
        try:
            with context.exclusive_call():
                return method(context, *args, **kwargs)
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
        finally:
            context.progress("")
        # Outside of the handler: its own context and cause stay as the model left them.
        raise own

    return call


@contextmanager
def exclusive_call(telling: Any) -> Iterator[None]:
    """Hold the lock; :class:`InputError` where another thread does, for both would capture and measure at once."""
    __tracebackhide__ = True
    if not telling.acquire(blocking=False):
        raise InputError(
            "one thread at a time can use these fixtures; found a call while another thread's is under way: each would "
            "be in the other's capture, random numbers and timings; call them one after the other"
        )
    try:
        yield
    finally:
        telling.release()


def depth_of_test() -> int:
    """The stack level of the caller outside this package, so that the warning names the test's line."""
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
    "baseline": errors.SlowerThanBaseline,
    "structure": errors.TooManyKernels,
    "base": errors.SlowerThanBase,
}


def failure_of(report: GraphReport, text: str) -> errors.GraphTestFailure:
    """The failure of a report whose verdict fails, by the first gate that carries the verdict."""
    judgements = [*report.judgements, *(j for batch in report.batches for j in batch.judgements)]
    worst = next(j for j in judgements if j.verdict is report.verdict)
    return _FAILURES[worst.gate](text, report)
