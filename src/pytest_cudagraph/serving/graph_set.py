"""The graphs of one model: captured on demand, limited in number, dropped when the model changes."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable

import torch

from pytest_cudagraph.errors import CaptureRefusal, InputError
from pytest_cudagraph.inputs.example import opaque_arguments
from pytest_cudagraph.protocols import CapturedGraph
from pytest_cudagraph.serving.model_watch import ModelWatch
from pytest_cudagraph.serving.row_analysis import RunnerSetup, learn_cut, written_arguments
from pytest_cudagraph.serving.rows import Cut, NoCut
from pytest_cudagraph.serving.statistics import Tally
from pytest_cudagraph.state import Undo

REFUSALS = (CaptureRefusal, InputError, torch.OutOfMemoryError)
"""Errors of a capture after which a batch size runs eager. Here an InputError concerns outputs of unsupported types."""


def check_max_graphs(max_graphs: int | None) -> None:
    """Raise :class:`~pytest_cudagraph.errors.InputError` unless it is a limit, or None."""
    if max_graphs is not None and (type(max_graphs) is not int or max_graphs < 1):
        raise InputError(f"max_graphs is a positive int, or None for one graph per batch size; found {max_graphs!r}")


class GraphSet:
    """At most ``max_graphs`` graphs in one pool; the least recently used is closed first. The caller holds the lock."""

    def __init__(self, setup: RunnerSetup, tally: Tally) -> None:
        self._setup, self._tally = setup, tally
        self._open: OrderedDict[int, CapturedGraph] = OrderedDict()
        self._kept: dict[int, tuple[torch.Tensor, ...]] = {}
        self._captured_before: set[int] = set()
        self.refused: dict[int, Exception] = {}
        self.cut: Cut | NoCut | None = None
        self._written: tuple[str, ...] | None = None
        self._pool = setup.backend.pool()
        self._watch = ModelWatch(setup.model)

    @property
    def memory_bytes(self) -> dict[int, int | None]:
        """Memory of each present graph, by batch size."""
        return {size: graph.receipt.memory_bytes for size, graph in self._open.items()}

    def at(self, size: int) -> CapturedGraph | None:
        """The graph of one batch size, captured if there is none; None if its capture is refused."""
        if self._watch.has_changed():
            self._tally.state_changes += 1
            self.drop()
        graph = self._open.get(size)
        if graph is None:
            return self._captured(size)
        if self._setup.max_graphs is not None:
            self._open.move_to_end(size)
        return graph

    def capture(self, sizes: Iterable[int]) -> None:
        """Capture these batch sizes, the largest first, up to the limit."""
        for size in sorted(sizes, reverse=True)[: self._setup.max_graphs]:
            self._captured(size)

    def recapture(self) -> None:
        """Drop all graphs and capture the same batch sizes again."""
        sizes = [*self._open, *self.refused]
        self.drop()
        self.capture(sizes)

    def drop(self) -> None:
        """Close all graphs and watch the model in its present state."""
        self.close()
        self._pool = self._setup.backend.pool()
        self._watch = ModelWatch(self._setup.model)

    def close(self) -> None:
        """Release all graphs and what they read."""
        self._open.clear()
        self.refused.clear()
        self.cut = self._written = None
        try:
            self._pool.close()
        finally:
            self._kept.clear()  # after the pool, which waits for the last replay

    def _captured(self, size: int) -> CapturedGraph | None:
        if size in self.refused:
            return None
        self._make_room()
        started_ns = time.perf_counter_ns()
        try:
            return self._capture(size)
        except REFUSALS as error:
            if self._setup.strict:
                raise
            self.refused[size] = error
            return None
        finally:
            self._tally.capture_ns += time.perf_counter_ns() - started_ns

    def _capture(self, size: int) -> CapturedGraph:
        setup, example = self._setup, self._setup.example_at(size)
        undo = Undo(setup.model, setup.backend, extras=opaque_arguments([example]))
        with undo.undone():
            graph = self._pool.capture(setup.model, example.args, example.kwargs, batch_size=size)
        kept = undo.kept
        self._refuse_to_write(undo, graph)
        if self.cut is None and size > 1:
            self.cut = learn_cut(setup, undo, size)
        undo.assert_unchanged()
        self._open[size], self._kept[size] = graph, kept
        self._tally.captures += 1
        self._tally.recaptures += size in self._captured_before
        self._captured_before.add(size)
        return graph

    def _refuse_to_write(self, undo: Undo, graph: CapturedGraph) -> None:
        """Refuse a call that writes to an argument, because a replay would write to the graph's copy of it."""
        if self._written is None:
            self._written = written_arguments(self._setup, undo, graph.receipt.batch_size)
        if self._written:
            graph.close()
            raise CaptureRefusal(
                f"the call writes to its argument {self._written[0]}, and a replay would write to a copy of it",
                hazard="mutates-input",
                fix="clone the argument before writing to it, or keep what is updated as a buffer of the model",
            )

    def _make_room(self) -> None:
        limit = self._setup.max_graphs
        while limit is not None and len(self._open) >= limit:
            size, graph = self._open.popitem(last=False)
            graph.close()
            del self._kept[size]
            self._tally.evictions += 1
