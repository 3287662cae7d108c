"""A time limit that really stops a compile.

Compilers run in three places: Python code of this thread (tracing, lowering), child processes (``g++``, ``ptxas``),
and PyTorch's pool of compile workers. An interval timer interrupts the first and, before it does, kills the others. It
exists on POSIX systems and in the main thread only; elsewhere the limit is looked at after each compile.
"""

from __future__ import annotations

import gc
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import psutil
import torch

from pytest_cudagraph.errors import CompileTimeout
from pytest_cudagraph.units import seconds_text, to_ns

_COMPILER = re.compile(
    r"(.*-)?(g\+\+|gcc|c\+\+|cc|cc1|cc1plus|clang|clang\+\+|collect2|ld|ld\.\w+|as|nvcc|cicc|ptxas|fatbinary|cudafe\+\+|icpx|icx|cl|link)"
    r"(-[\d.]+)?(\.exe)?"
)
_WORKER = "compile_worker"  # in the command line of every process of PyTorch's pool
_SHORTEST_S = 1e-3  # setitimer takes 0 as "no alarm"
_AGAIN_S = 0.5  # an exception raised inside a destructor is lost, so the alarm keeps ringing


class TimeIsUp(BaseException):
    """Interrupts a compile; no ``except Exception`` of the compiler may swallow it. Never leaves this module."""


class Deadline:
    """The moment until which the compiles of one model may run."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._started_s = time.monotonic()

    @property
    def ends_s(self) -> float:
        """On the clock of :func:`time.monotonic`."""
        return self._started_s + self.limit_s

    @property
    def remaining_s(self) -> float:
        """Seconds left; 0 when there are none."""
        return max(0.0, self.ends_s - time.monotonic())

    def timeout(self, mode: str, batch_size: int) -> CompileTimeout:
        """The error of a compile that ran into this deadline."""
        used = seconds_text(to_ns(time.monotonic() - self._started_s))
        return CompileTimeout(
            f"compile={mode!r} was stopped at batch {batch_size} after {used}; "
            f"all batch sizes of a model together may take {seconds_text(to_ns(self.limit_s))}\n"
            f"  to try: fewer batch sizes, a larger time limit, or compile='none'"
        )


@contextmanager
def stopped_at(deadline: Deadline, mode: str, batch_size: int) -> Iterator[None]:
    """Stop what runs inside at the deadline, with :class:`~pytest_cudagraph.errors.CompileTimeout`."""
    alarm = _Alarm(deadline.ends_s) if can_interrupt() else None
    modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    try:
        if alarm:
            alarm.set()
        yield
        if alarm:
            alarm.clear()  # here already, so that an alarm of the last moment is still caught below
    except BaseException as exc:
        # Whatever surfaced, a compiler's own wrapping of the interruption included, the clock is the reason.
        if alarm and alarm.rang and not isinstance(exc, KeyboardInterrupt):
            alarm.clear()
            _leave_modes(exc, *modes)
            raise deadline.timeout(mode, batch_size) from None
        raise
    finally:
        if alarm:
            alarm.clear()
    if deadline.remaining_s == 0:
        raise deadline.timeout(mode, batch_size)


def _leave_modes(interruption: BaseException, inference: bool, grad: bool) -> None:
    """Bring torch's modes back to what they were before what was interrupted.

    An alarm that rings while a mode is being entered leaves a context that nobody will leave. It puts back the mode it
    found when its memory goes, which for frames of a traceback may be in the middle of another test: so it goes now.
    """
    told: BaseException | None = interruption
    while told is not None:
        traceback.clear_frames(told.__traceback__)
        told = told.__context__
    gc.collect()
    if torch.is_inference_mode_enabled() != inference:
        guard = torch._C._InferenceMode(inference)
        guard.__enter__()  # type: ignore[no-untyped-call]
        _LASTING.append(guard)
    torch.set_grad_enabled(grad)


_LASTING: list[object] = []
"""Modes that are never left: leaving them would bring back what an interrupted context has set."""


def can_interrupt() -> bool:
    """Whether Python code of this thread can be interrupted by a timer."""
    return (
        hasattr(signal, "setitimer")
        and threading.current_thread() is threading.main_thread()
        # A handler that was not installed from Python could not be put back.
        and signal.getsignal(signal.SIGALRM) is not None
    )


class _Alarm:
    """The process's one interval timer, shared with whoever armed it before: the earlier moment rings first."""

    def __init__(self, ends_s: float) -> None:
        self.rang = False
        self._ends_s = ends_s
        self._is_set = False
        self._others: set[int] = set()
        self._handler: Callable[[int, FrameType | None], Any] | int | None = None
        self._other_due_s: float | None = None
        self._other_interval_s = 0.0

    def set(self) -> None:
        self._others = {child.pid for child in psutil.Process().children(recursive=True)}
        delay_s, self._other_interval_s = signal.setitimer(signal.ITIMER_REAL, 0)
        self._other_due_s = time.monotonic() + delay_s if delay_s else None
        self._handler = signal.signal(signal.SIGALRM, self._ring)
        self._is_set = True
        self._arm(self._ends_s)

    def clear(self) -> None:
        if not self._is_set:
            return
        self._is_set = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._handler)
        if self._other_due_s is not None:
            left_s = max(self._other_due_s - time.monotonic(), _SHORTEST_S)
            signal.setitimer(signal.ITIMER_REAL, left_s, self._other_interval_s)
        if self.rang:
            _forget_workers()

    def _arm(self, own_due_s: float) -> None:
        due_s = own_due_s if self._other_due_s is None else min(own_due_s, self._other_due_s)
        signal.setitimer(signal.ITIMER_REAL, max(due_s - time.monotonic(), _SHORTEST_S))

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if not self._is_set:
            return
        now_s = time.monotonic()
        if self._other_due_s is not None and now_s >= self._other_due_s:
            self._other_due_s = now_s + self._other_interval_s if self._other_interval_s else None
            self._arm(max(self._ends_s, now_s + _AGAIN_S))  # before the call, which may raise, in vain perhaps
            if callable(self._handler):
                self._handler(number, frame)
        if now_s < self._ends_s:
            self._arm(self._ends_s)
            return
        self.rang = True
        signal.setitimer(signal.ITIMER_REAL, 0)  # nothing may interrupt the killing
        _kill_compilers(self._others)
        self._arm(time.monotonic() + _AGAIN_S)
        raise TimeIsUp


def _kill_compilers(spare: set[int]) -> None:
    """Kill the compilers below this process, before their parents die and they become nobody's children."""
    for child in psutil.Process().children(recursive=True):
        try:
            is_compiler = child.pid not in spare and _COMPILER.fullmatch(child.name()) is not None
            if is_compiler or _is_worker(child):
                child.kill()
        except psutil.Error:
            continue  # gone by itself


def _is_worker(process: psutil.Process) -> bool:
    # A worker may be older than this compile and still be busy with nothing but this compile.
    return any(_WORKER in word for word in process.cmdline())


def _forget_workers() -> None:
    """Let PyTorch start a new pool next time; it would wait for ever for answers of the killed one."""
    compiling = sys.modules.get("torch._inductor.async_compile")
    shutdown = getattr(compiling, "shutdown_compile_workers", None)
    if shutdown is not None:
        shutdown()
