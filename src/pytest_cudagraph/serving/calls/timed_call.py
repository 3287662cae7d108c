"""One timed call: its duration, and what runners say about the path that served it."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from pytest_cudagraph.errors import InputError
from pytest_cudagraph.foreign import value_text

Served = dict[tuple[str, str], int]
"""How often each path (``graph``, ``compiled``, ``eager``) served a model's call, by path and reason."""


class CallRecord(NamedTuple):
    """One finished call."""

    name: str
    started_ns: int
    """By the clock of the monitor."""
    duration_ns: int
    tokens: int
    batch_size: int | None
    failure: str
    """The class of the exception. Empty if the call succeeded."""
    served: Served | None
    """None if no runner was called."""
    is_synchronized: bool
    """Whether the GPU had finished all work at both readings of the clock."""


class CallSink(Protocol):
    """Where finished calls go."""

    is_enabled: bool

    @property
    def now_ns(self) -> Callable[[], int]: ...

    def add(self, record: tuple[Any, ...]) -> None:
        """Keep one :class:`CallRecord`, as a plain tuple: making the record costs as much as the rest."""
        ...


_RUNNING: ContextVar[TimedCall | None] = ContextVar("pytest_cudagraph_timed_call", default=None)
"""The innermost timed call of this thread or task."""


def note_served(path: str, reason: str = "") -> None:
    """Tell the running timed call which path served a model's call. Runners call this where they count it."""
    call = _RUNNING.get()
    if call is not None:
        call.note(path, reason)


class TimedCall:
    """Times its ``with`` block. ``tokens`` and ``batch_size`` may be set in the block.

    Raises :class:`~pytest_cudagraph.errors.InputError` at the end of the block if they are no whole numbers.
    """

    __slots__ = ("_name", "_outer", "_resumed_ns", "_served", "_sink", "_spent_ns", "_started_ns", "_wait",
                 "batch_size", "tokens")  # fmt: skip

    def __init__(
        self, sink: CallSink, name: str, tokens: int, batch_size: int | None, wait: Callable[[], object] | None
    ) -> None:
        self._sink, self._name, self._wait = sink, name, wait
        self.tokens, self.batch_size = tokens, batch_size
        self._served: Served | None = None
        self._outer: TimedCall | None = None
        self._started_ns: int | None = None
        self._spent_ns = 0

    def __enter__(self) -> TimedCall:
        self._spent_ns, self._started_ns = 0, None
        self.resume()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        __tracebackhide__ = True
        try:
            self.pause()
        except BaseException as late:
            self.finish(type(late).__name__)
            raise
        self.finish("" if kind is None else kind.__name__)

    def resume(self) -> None:
        """Start or continue the time. A generator's time passes only while it runs."""
        self._outer = _RUNNING.get()
        _RUNNING.set(self)
        if self._wait is not None:
            self._wait()
        self._resumed_ns = now_ns = self._sink.now_ns()
        if self._started_ns is None:
            self._started_ns = now_ns

    def pause(self) -> None:
        """Stop the time. With a ``wait`` this raises what the GPU's work raises."""
        # A generator that is closed elsewhere must not change the running call of that place.
        if _RUNNING.get() is self:
            _RUNNING.set(self._outer)
        try:
            if self._wait is not None:
                self._wait()
        finally:
            self._spent_ns += max(self._sink.now_ns() - self._resumed_ns, 0)

    def note(self, path: str, reason: str, count: int = 1) -> None:
        """Count calls of a model within this call."""
        if self._served is None:
            self._served = {}
        self._served[path, reason] = self._served.get((path, reason), 0) + count

    def finish(self, failure: str) -> None:
        """Hand the record over. Within another timed call the served paths count there too."""
        __tracebackhide__ = True
        tokens, batch_size, served = self.tokens, self.batch_size, self._served
        mistake = "" if type(tokens) is int and tokens >= 0 and batch_size is None else self._mistake()
        outer, self._outer, self._served = self._outer, None, None
        if served is not None and outer is not None:
            for (path, reason), count in served.items():
                outer.note(path, reason, count)
        if self._sink.is_enabled:
            tokens, batch_size = (0, None) if mistake else (self.tokens, self.batch_size)
            is_synchronized = self._wait is not None
            self._sink.add(
                (self._name, self._started_ns, self._spent_ns, tokens, batch_size, failure, served, is_synchronized)
            )
        if mistake and not failure:
            raise InputError(mistake)

    def _mistake(self) -> str:
        """What is wrong with tokens and batch size, as whole numbers of any kind."""
        __tracebackhide__ = True
        for what, least in (("tokens", 0), ("batch_size", 1)):
            value = getattr(self, what)
            if value is None and what == "batch_size":
                continue
            try:
                number = operator.index(value)
            except TypeError:
                number = least - 1
            if number < least:
                return f"{what} must be a whole number of {least} or more; found {value_text(value)}"
            setattr(self, what, number)
        return ""


def whole_ns(now_ns: Callable[[], float]) -> Callable[[], int]:
    """Whole nanoseconds of a clock of the user's. A reading that is not finite repeats the last one."""
    last_ns = 0

    def read() -> int:
        nonlocal last_ns
        time_ns = now_ns()
        last_ns = int(time_ns) if math.isfinite(time_ns) else last_ns
        return last_ns

    return read


class _Off(TimedCall):
    """What a switched-off monitor gives: it times and keeps nothing."""

    __slots__ = ()

    def __init__(self) -> None:
        pass

    def __enter__(self) -> TimedCall:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        pass


OFF = _Off()
