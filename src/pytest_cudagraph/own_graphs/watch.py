"""Watch every CUDA graph of a program: five methods of ``torch.cuda.CUDAGraph`` are wrapped while a watch is on.

``torch.cuda.graph``, ``make_graphed_callables`` and cudagraph trees all pass through them. Code that holds a bound
method from before the watch is not seen.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch

from pytest_cudagraph.backends.capture_mode import Replacement, hidden_from_compiler, is_capturing, replaced
from pytest_cudagraph.backends.cuda.nodes import count_nodes, load_driver
from pytest_cudagraph.errors import InputError
from pytest_cudagraph.foreign import message_of
from pytest_cudagraph.own_graphs.capture_record import CallRecorder, CaptureRecorder
from pytest_cudagraph.own_graphs.ledger import GraphLedger, GraphRecord, WatchedCall
from pytest_cudagraph.own_graphs.memory import is_inside, pool_ranges
from pytest_cudagraph.sources import user_site

_RECORD = "_pytest_cudagraph_record"
"""The attribute of a graph that holds its record. Looking it up costs less than a table."""

_KEPT_BY_USER = "_pytest_cudagraph_kept_by_user"

_TREES = "cudagraph_trees.py"

_ONE_WATCH = threading.Lock()


class GraphWatch(GraphLedger):
    """A ledger that is being filled. ``call()`` marks what the program does for one request."""

    __slots__ = ("_counts_nodes", "_nodes_of", "_thread")

    def __init__(self, *, nodes: bool) -> None:
        super().__init__()
        self._counts_nodes = nodes
        self._nodes_of = load_driver() if nodes else None
        self._thread = _Open()

    @contextmanager
    def call(self, label: str = "") -> Iterator[WatchedCall]:
        """Mark one call of this thread. Operators inside are looked at one by one: some microseconds each."""
        call = WatchedCall(label=label or str(len(self.calls)))
        self.calls.append(call)
        outer, self._thread.call = self._thread.call, call
        try:
            with hidden_from_compiler(CallRecorder)(call, self._is_capturing):
                yield call
        finally:
            self._thread.call = outer

    def _is_capturing(self) -> bool:
        return bool(self._thread.captures)

    def replacements(self) -> Iterator[Replacement]:
        """The five methods, wrapped."""
        graph = torch.cuda.CUDAGraph
        if self._counts_nodes:
            yield graph, "__init__", self._init
        yield graph, "capture_begin", self._capture_begin
        yield graph, "capture_end", self._capture_end
        yield graph, "replay", self._replay
        yield graph, "reset", self._reset

    def _init(self, original: Callable[..., None]) -> Callable[..., None]:
        # The nodes of a graph can be read only before torch drops the graph behind the executable one.
        @functools.wraps(original)
        def keeping(graph: Any, keep_graph: bool = False) -> None:
            original(graph, True)
            graph.__dict__[_KEPT_BY_USER] = keep_graph

        return keeping

    def _capture_begin(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
            begin_ns, reserved_bytes = time.perf_counter_ns(), torch.cuda.memory_reserved()
            original(graph, *args, **kwargs)
            if is_capturing():
                return  # a capture of this package has reports of its own
            record = GraphRecord(
                ledger=self,
                number=len(self.graphs),
                site=user_site(),
                stream=torch.cuda.current_stream().cuda_stream,
                watches_memory=not _is_called_from(_TREES),
            )
            self.graphs.append(record)
            if self._thread.call is not None:
                self._thread.call.captures += 1
            recorder = hidden_from_compiler(CaptureRecorder)(record)
            recorder.__enter__()  # type: ignore[no-untyped-call]
            self._thread.captures.append((graph, record, recorder, begin_ns, reserved_bytes))

        return capture_begin

    def _capture_end(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        @functools.wraps(original)
        def capture_end(graph: Any) -> None:
            captures = self._thread.captures
            if not captures or captures[-1][0] is not graph:
                original(graph)
                return
            _, record, recorder, begin_ns, reserved_bytes = captures.pop()
            recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            try:
                original(graph)
                if not graph.__dict__.get(_KEPT_BY_USER, True):
                    graph.instantiate()  # as torch does for a graph that is not kept
            except Exception as error:
                record.failure = (message_of(error).splitlines() or [type(error).__name__])[0]
                raise
            finally:
                recorder.forget_made()
            record.capture_ns = time.perf_counter_ns() - begin_ns
            record.pool_bytes = torch.cuda.memory_reserved() - reserved_bytes
            _leave_out_pools(record)
            self._count(graph, record)
            graph.__dict__[_RECORD] = record

        return capture_end

    def _count(self, graph: Any, record: GraphRecord) -> None:
        if self._counts_nodes:
            counted = count_nodes(graph, self._nodes_of)
            record.nodes, record.kernel_names, record.why_not_counted = counted.nodes, counted.kernel_names, counted.why

    def _replay(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        thread = self._thread

        @functools.wraps(original)
        def replay(graph: Any) -> None:
            record = graph.__dict__.get(_RECORD)
            if record is not None and record.ledger is self:
                record.replays += 1
                if record.has_freed:
                    record.freed_replays += 1
            elif not is_capturing():
                self.unknown_replays += 1
            if thread.call is not None:
                thread.call.replays += 1
            original(graph)

        return replay

    def _reset(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        @functools.wraps(original)
        def reset(graph: Any) -> None:
            record = graph.__dict__.pop(_RECORD, None)
            if record is not None and record.ledger is self:
                record.is_closed = True
            original(graph)

        return reset


class _Open(threading.local):
    """What this thread does now."""

    def __init__(self) -> None:
        self.captures: list[tuple[Any, GraphRecord, CaptureRecorder, int, int]] = []
        self.call: WatchedCall | None = None


def _leave_out_pools(record: GraphRecord) -> None:
    """Do not watch the memory of other graphs: a backward reads what its forward left in the pool of both."""
    ranges = pool_ranges()
    for key in [key for key, use in record.memory.items() if is_inside(use.address, ranges)]:
        del record.memory[key]
    record.has_freed = any(use.is_freed for use in record.memory.values())


def _is_called_from(file: str) -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(file):
            return True
        frame = frame.f_back
    return False


@contextmanager
def graph_watch(*, nodes: bool = False) -> Iterator[GraphWatch]:
    """Watch all graphs that this process captures and replays, and yield their ledger.

    ``nodes`` also counts the nodes and the kernels of each graph. For that each graph is kept beside its executable
    form (``keep_graph=True``), which costs host memory.

    Raises :class:`~pytest_cudagraph.errors.InputError` inside another watch: a process has one.
    """
    if not _ONE_WATCH.acquire(blocking=False):
        raise InputError("a process has one graph_watch at a time; found another that is on: use its ledger")
    watch = GraphWatch(nodes=nodes)
    try:
        with ExitStack() as stack:
            stack.enter_context(replaced(watch.replacements()))
            yield watch
    finally:
        _ONE_WATCH.release()
