"""Records the calls of serving code: duration, tokens, batch size, failure, and whether a graph served them.

A call adds one tuple to a queue, without a lock. Every 64th call counts the last 64 into the totals of their names.
So memory is bounded by the number of names, not by the number of calls.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from pytest_cudagraph.child_process import begin_in_forked_child
from pytest_cudagraph.errors import ExpectationMissed, InputError
from pytest_cudagraph.foreign import value_text
from pytest_cudagraph.protocols import Clock
from pytest_cudagraph.serving.calls.call_export import (
    MonitorState,
    openmetrics,
    read_export,
    summary_document,
    write_export,
)
from pytest_cudagraph.serving.calls.call_summary import OTHERS, CallSummary, CallTotals, misses
from pytest_cudagraph.serving.calls.resource_sampler import ResourceSampler, ResourceSpread
from pytest_cudagraph.serving.calls.timed_call import OFF, CallRecord, TimedCall, whole_ns
from pytest_cudagraph.serving.calls.watched_function import watched

T = TypeVar("T")

_FOLDED_AT = 64
"""Calls that are counted into the totals at once: some 30 µs of work for the last of them."""
_MOST_NAMES = 1000
"""A name per request would fill the memory. Further names are counted together."""


class CallMonitor:
    """Records calls from any number of threads and tasks. Example::

        monitor = CallMonitor()

        @monitor.watch("prefill")
        def prefill(tokens): ...

        with monitor.measure("decode", tokens=8, batch_size=8):
            run(tokens)
        print("\\n".join(monitor.summary()["decode"].lines()))

    ``keep`` is the number of last calls that are kept one by one, for :meth:`summary` and :meth:`export`. The paths
    ``graph``, ``compiled`` and ``eager`` are those that a :class:`~pytest_cudagraph.GraphRunner` or the drop-in
    compiler counted in the call. A forked process starts with no calls. Raises
    :class:`~pytest_cudagraph.errors.InputError` for an invalid ``keep``.
    """

    def __init__(self, *, keep: int = 1000, clock: Clock | None = None) -> None:
        if type(keep) is not int or keep < 0:
            raise InputError(f"keep must be a whole number of 0 or more; found {value_text(keep)}")
        self.now_ns: Callable[[], int] = whole_ns(clock.now_ns) if clock is not None else time.perf_counter_ns
        self.is_enabled = True
        self._epoch_ns = time.time_ns() - self.now_ns()
        self._pending: deque[tuple[Any, ...]] = deque()
        self._last: deque[tuple[Any, ...]] = deque(maxlen=keep)
        self._totals: dict[str, CallTotals] = {}
        self._sampler: ResourceSampler | None = None
        self._merged: list[ResourceSpread] = []
        # Reentrant: a signal handler or a finalizer may read while this thread counts.
        self._lock = threading.RLock()
        self._counting = threading.Lock()
        begin_in_forked_child(self, _begin_child)

    def watch(
        self,
        name: str,
        *,
        tokens: int | Callable[[Any], int] = 0,
        batch_size: int | Callable[..., int] | None = None,
        synchronize: bool = False,
    ) -> Callable[[Callable[..., Any]], Any]:
        """A decorator that records each call of a function, coroutine function or generator function.

        ``tokens`` is a number, or counts them in the result, or in each item of a generator. ``batch_size`` is a
        number, or takes the arguments of the call. ``synchronize`` as in :meth:`measure`.
        """
        __tracebackhide__ = True
        _check_name(name)
        count = tokens if callable(tokens) else None
        number = 0 if callable(tokens) else tokens
        wait = _waiting(synchronize)

        def start(args: tuple[Any, ...], kwargs: dict[str, Any]) -> TimedCall:
            rows = batch_size(*args, **kwargs) if callable(batch_size) else batch_size
            return TimedCall(self, name, number, rows, wait)

        return lambda function: watched(function, self, start, count)

    def measure(
        self, name: str, *, tokens: int = 0, batch_size: int | None = None, synchronize: bool = False
    ) -> TimedCall:
        """A context manager that records its block. Its ``tokens`` and ``batch_size`` may be set in the block.

        The time ends where the block does, so work that the GPU has not finished is not in it. With ``synchronize``
        both readings of the clock wait for the GPU, and the record says so.
        """
        if not self.is_enabled:
            return OFF
        return TimedCall(self, name, tokens, batch_size, _waiting(synchronize) if synchronize else None)

    def add(self, record: tuple[Any, ...]) -> None:
        """Keep a finished call. For :class:`TimedCall`."""
        pending = self._pending
        pending.append(record)
        # While another thread counts, this call goes on, and its turn comes with the next ones. A call within a count
        # (of a finalizer, of a signal handler) does so too. An interrupt between acquire() and try would keep the lock.
        if len(pending) >= _FOLDED_AT and not self._counting.locked():
            self._counted(lambda: None)

    def enable(self) -> None:
        """Record calls, as a new monitor does."""
        self.is_enabled = True

    def disable(self) -> None:
        """Record no further calls. What was recorded stays."""
        self.is_enabled = False

    def clear(self) -> None:
        """Forget all calls and readings."""
        self._counted(self._forget)

    def summary(self, last_n: int | None = None) -> dict[str, CallSummary]:
        """The calls by name: all, or the last ``last_n`` of all names, of which at most ``keep`` are known."""
        totals = self._state(last_n).totals
        return {name: each.summary(name) for name, each in totals.items()}

    def records(self) -> list[CallRecord]:
        """The last calls one by one, the oldest first: at most ``keep``."""
        return self._state().records

    def expect(
        self,
        name: str,
        *,
        max_p50_ms: float | None = None,
        min_tokens_per_s: float | None = None,
        min_graph_hit_ratio: float | None = None,
        max_failures: int = 0,
        min_calls: int = 1,
    ) -> CallSummary:
        """The summary of a name, if its calls keep every limit. A limit of None is not judged.

        Raises :class:`~pytest_cudagraph.errors.ExpectationMissed` with each limit that is missed and the summary.
        """
        __tracebackhide__ = True
        summaries = self.summary()
        if name not in summaries:
            others = ", ".join(sorted(summaries)) or "none"
            raise ExpectationMissed(f"no call named {name!r} was recorded; found: {others}")
        summary = summaries[name]
        missed = misses(
            summary, max_p50_ms=max_p50_ms, min_tokens_per_s=min_tokens_per_s, max_failures=max_failures,
            min_graph_hit_ratio=min_graph_hit_ratio, min_calls=min_calls,
        )  # fmt: skip
        if missed:
            raise ExpectationMissed("\n  ".join([*missed, *summary.lines()]))
        return summary

    def sampling(self, every_s: float = 1.0) -> ResourceSampler:
        """A context manager whose thread reads memory, load, clocks and power, for the exports of this monitor.

        Raises :class:`~pytest_cudagraph.errors.InputError` for an invalid ``every_s``.
        """
        self._sampler = ResourceSampler(every_s, self._sampler)
        return self._sampler

    def export(self, path: str | Path, format: Literal["json", "openmetrics"] = "json") -> Path:
        """Write all calls to a file, whole or not at all. Return the file.

        Below a folder the file is ``calls-HOST-PID.json`` (or ``.prom``), so that processes share a folder. Raises
        :class:`~pytest_cudagraph.errors.CudagraphError` if the file cannot be written. The calls stay.
        """
        return write_export(Path(path), self._state(), format)

    def entries(self) -> list[dict[str, Any]]:
        """The numbers of each name as plain data, without histograms and single calls."""
        return [summary_document(each) for each in self.summary().values()]

    def openmetrics(self) -> str:
        """All calls in the text format that Prometheus reads, for the ``/metrics`` of a server."""
        return openmetrics(self._state())

    @classmethod
    def merged(cls, *paths: str | Path, keep: int = 1000) -> CallMonitor:
        """A monitor with the calls of JSON exports, of any processes. A folder stands for all its ``calls-*.json``.

        Raises :class:`~pytest_cudagraph.errors.InputError` for a file that is no export.
        """
        monitor = cls(keep=keep)
        records: list[CallRecord] = []
        for path in map(Path, paths):
            for file in sorted(path.glob("calls-*.json")) if path.is_dir() else [path]:
                state = read_export(file, monitor._epoch_ns)
                records += state.records
                monitor._merged += state.resources
                for name, totals in state.totals.items():
                    monitor._totals_of(name).merge(totals)
        records.sort(key=lambda record: record.started_ns)
        monitor._last.extend(records)
        return monitor

    def _totals_of(self, name: str) -> CallTotals:
        totals = self._totals.get(name)
        if totals is None:
            name = name if len(self._totals) < _MOST_NAMES else OTHERS
            totals = self._totals.setdefault(name, CallTotals())
        return totals

    def _counted(self, work: Callable[[], T]) -> T:
        """Count the pending calls, then do ``work``, under the lock.

        Within another count of this thread (of a finalizer, of a signal handler) ``work`` meets the totals as they are.
        """
        with self._lock:
            if self._counting.locked():
                result = work()
            else:
                with self._counting:
                    self._fold()
                    # Stored: an interrupt right after a call that is returned would keep the lock.
                    result = work()
        return result

    def _fold(self) -> None:
        """Count the pending calls. The caller holds the lock; calls of other threads are added meanwhile."""
        # One by one, so that an interrupt (Ctrl-C, an alarm) loses one call at most.
        for _ in range(len(self._pending)):
            if not self._pending:  # a signal handler has cleared the monitor
                return
            record = self._pending.popleft()
            self._totals_of(record[0]).add(record, self._epoch_ns)
            self._last.append(record)

    def _state(self, last_n: int | None = None) -> MonitorState:
        if last_n is not None and (type(last_n) is not int or last_n < 1):
            raise InputError(f"last_n must be a whole number of 1 or more; found {value_text(last_n)}")
        return self._counted(lambda: self._read(last_n))

    def _read(self, last_n: int | None) -> MonitorState:
        """What was counted. The caller holds the lock."""
        taken = [*self._last][-last_n if last_n else None :]
        totals: dict[str, CallTotals] = {}
        if last_n is None:
            for name, each in self._totals.items():
                totals.setdefault(name, CallTotals()).merge(each)
        else:
            for record in taken:
                totals.setdefault(record[0], CallTotals()).add(record, self._epoch_ns)
        sampled = self._sampler.spreads() if self._sampler else []
        return MonitorState(
            totals=totals, records=[CallRecord._make(each) for each in taken], epoch_ns=self._epoch_ns,
            resources=[*self._merged, *sampled],
        )  # fmt: skip

    def _forget(self) -> None:
        self._pending.clear()
        # New objects: a signal handler may clear while this thread goes through the old ones.
        self._last = deque(maxlen=self._last.maxlen)
        self._totals = {}
        self._merged = []
        if self._sampler is not None:
            self._sampler.clear()


def _begin_child(monitor: CallMonitor) -> None:
    """In a forked child: the calls are the parent's, and another thread may have held the lock."""
    monitor._lock, monitor._counting, monitor._sampler = threading.RLock(), threading.Lock(), None
    monitor._forget()


def _waiting(synchronize: bool) -> Callable[[], object] | None:
    """What waits for the GPU. None without one: then the work has ended where the call ends."""
    return torch.cuda.synchronize if synchronize and torch.cuda.is_available() else None


def _check_name(name: Any) -> None:
    __tracebackhide__ = True
    if not isinstance(name, str) or not name:
        raise InputError(f"a name of calls is a text, as in watch('decode'); found {value_text(name)}")
