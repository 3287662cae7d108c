"""Stop a compile at its time limit.

Compilers run in three places: Python code of this thread (tracing, lowering), child processes (``g++``, ``ptxas``),
and PyTorch's pool of compile workers. An interval timer kills the processes, then interrupts the Python code. Such a
timer exists only on POSIX systems and in the main thread. Elsewhere the limit is checked after each compile.
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
_WORKER = "compile_worker"  # in the command line of each process of PyTorch's pool
_SHORTEST_S = 1e-3  # setitimer takes 0 as "no alarm"
_AGAIN_S = 0.5  # the alarm repeats, because Python ignores an exception inside a destructor


class TimeIsUp(BaseException):
    """Interrupts a compile. A BaseException, so that ``except Exception`` in a compiler does not catch it."""


class _SteadyClock:
    """Not a name of the module: freezegun would replace it there and stop every time limit."""

    now_s = staticmethod(time.monotonic)


class Deadline:
    """The end of the time for all compiles of one model."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._started_s = _SteadyClock.now_s()

    @property
    def ends_s(self) -> float:
        """On the clock of :func:`time.monotonic`."""
        return self._started_s + self.limit_s

    @property
    def remaining_s(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self.ends_s - _SteadyClock.now_s())

    def timeout(self, mode: str, batch_size: int) -> CompileTimeout:
        """The error for a compile that reached the deadline."""
        used = seconds_text(to_ns(_SteadyClock.now_s() - self._started_s))
        return CompileTimeout(
            f"compile={mode!r} was stopped at batch {batch_size} after {used}: "
            f"the limit for all batch sizes of a model together is {seconds_text(to_ns(self.limit_s))}\n"
            f"  to try: fewer batch sizes, a larger time limit, or compile='none'"
        )


@contextmanager
def stopped_at(deadline: Deadline, mode: str, batch_size: int) -> Iterator[None]:
    """Stop the code inside at the deadline. Raises :class:`~pytest_cudagraph.errors.CompileTimeout`."""
    alarm = _Alarm(deadline.ends_s)
    modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    try:
        alarm.set()
        yield
        alarm.clear()  # here, so that an alarm at the last moment is still handled below
    except BaseException as exc:
        alarm.clear()
        if not alarm.rang or isinstance(exc, KeyboardInterrupt):
            raise
        # The compiler may have wrapped the interruption in its own exception. The alarm is the cause.
        _restore_modes(exc, *modes)
        raise deadline.timeout(mode, batch_size) from None
    finally:
        alarm.clear()
    if deadline.remaining_s == 0:
        raise deadline.timeout(mode, batch_size)


def _restore_modes(interruption: BaseException, is_inference: bool, has_grad: bool) -> None:
    """Restore torch's modes after an interruption.

    If the alarm rings while ``torch.inference_mode`` is being entered, nobody leaves it. Such a guard restores its old
    mode when Python deletes it, which may be during a later test. So delete it here, with the frames that hold it.
    """
    error: BaseException | None = interruption
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
    gc.collect()
    if torch.is_inference_mode_enabled() != is_inference:
        guard = torch._C._InferenceMode(is_inference)
        guard.__enter__()  # type: ignore[no-untyped-call]
        _NEVER_LEFT.append(guard)
    torch.set_grad_enabled(has_grad)


_NEVER_LEFT: list[object] = []
"""Guards of :func:`_restore_modes`. Leaving one would set the mode of the interrupted code again."""


def _can_interrupt() -> bool:
    """Whether a timer can interrupt Python code of this thread."""
    return (
        hasattr(signal, "setitimer")
        and threading.current_thread() is threading.main_thread()
        # Python cannot restore a handler that was installed by C code.
        and signal.getsignal(signal.SIGALRM) is not None
    )


class _Alarm:
    """The interval timer of the process. Another plugin may have set it before: both alarms ring at their times."""

    def __init__(self, ends_s: float) -> None:
        self.rang = False
        self._ends_s = ends_s
        self._is_set = False
        self._others: set[int] = set()
        self._handler: Callable[[int, FrameType | None], Any] | int | None = None
        self._other_due_s: float | None = None
        self._other_interval_s = 0.0

    def set(self) -> None:
        if not _can_interrupt():
            return
        self._others = {child.pid for child in psutil.Process().children(recursive=True)}
        delay_s, self._other_interval_s = signal.setitimer(signal.ITIMER_REAL, 0)
        self._other_due_s = _SteadyClock.now_s() + delay_s if delay_s else None
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
            left_s = max(self._other_due_s - _SteadyClock.now_s(), _SHORTEST_S)
            signal.setitimer(signal.ITIMER_REAL, left_s, self._other_interval_s)
        if self.rang:
            _forget_workers()

    def _arm(self, own_due_s: float) -> None:
        due_s = own_due_s if self._other_due_s is None else min(own_due_s, self._other_due_s)
        signal.setitimer(signal.ITIMER_REAL, max(due_s - _SteadyClock.now_s(), _SHORTEST_S))

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if not self._is_set:
            return
        now_s = _SteadyClock.now_s()
        if self._other_due_s is not None and now_s >= self._other_due_s:
            self._other_due_s = now_s + self._other_interval_s if self._other_interval_s else None
            self._arm(max(self._ends_s, now_s + _AGAIN_S))  # first, because the handler may raise
            if callable(self._handler):
                self._handler(number, frame)
        if now_s < self._ends_s:
            self._arm(self._ends_s)
            return
        self.rang = True
        signal.setitimer(signal.ITIMER_REAL, 0)  # no alarm while killing
        _kill_compilers(self._others)
        self._arm(_SteadyClock.now_s() + _AGAIN_S)
        raise TimeIsUp


def _kill_compilers(spare: set[int]) -> None:
    """Kill the compilers below this process, while their parents still live and they can be found."""
    for child in psutil.Process().children(recursive=True):
        try:
            is_compiler = child.pid not in spare and _COMPILER.fullmatch(child.name()) is not None
            # A pool worker may be older than this compile, but works only for it.
            if is_compiler or any(_WORKER in word for word in child.cmdline()):
                child.kill()
        except psutil.Error:
            continue  # already ended


def _forget_workers() -> None:
    """Let PyTorch start a new pool next time. It would wait for the killed one for ever."""
    compiling = sys.modules.get("torch._inductor.async_compile")
    shutdown = getattr(compiling, "shutdown_compile_workers", None)
    if shutdown is not None:
        shutdown()
