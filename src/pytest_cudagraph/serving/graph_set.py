"""The graphs of one model: captured on demand, limited in number, dropped when the model changes."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch

from pytest_cudagraph.errors import CaptureRefusal, InputError
from pytest_cudagraph.foreign import value_text
from pytest_cudagraph.inputs.example import opaque_arguments
from pytest_cudagraph.model_watch import ModelWatch
from pytest_cudagraph.protocols import Backend, CapturedGraph, Model
from pytest_cudagraph.serving.replacements import Replacements
from pytest_cudagraph.serving.row_analysis import RunnerSetup, learn_cut, writes_parameters, written_arguments
from pytest_cudagraph.serving.rows import CallForm, Cut, NoCut
from pytest_cudagraph.serving.statistics import FormStatistics, NoGraphReason, Tally
from pytest_cudagraph.state import NO_CONSTANTS, Constants, Undo

REFUSALS = (CaptureRefusal, InputError, torch.OutOfMemoryError)
"""Errors of a capture after which a batch size runs eager. Here an InputError concerns outputs of unsupported types."""

_NEARNESS: Mapping[Any, int] = {NoGraphReason.OTHER_ARGUMENT: 0, NoGraphReason.OTHER_SHAPE: 1}
"""How near a form is to a call that fits none, by the reason. The reason of the nearest form is counted."""


def check_max_graphs(max_graphs: int | None) -> None:
    """Raise :class:`~pytest_cudagraph.errors.InputError` unless it is a limit, or None."""
    if max_graphs is not None and (type(max_graphs) is not int or max_graphs < 1):
        shown = value_text(max_graphs)
        raise InputError(f"max_graphs is a positive int, or None for one graph per batch size; found {shown}")


class FormGraphs:
    """The graphs of one form by batch size, and what their captures have shown."""

    def __init__(self, setup: RunnerSetup, batch_sizes: Sequence[int]) -> None:
        self.setup, self.sizes = setup, tuple(sorted(batch_sizes))
        self.size_for = [self.sizes[bisect_left(self.sizes, rows)] for rows in range(self.sizes[-1] + 1)]
        self.call = CallForm(setup.example, setup.batch_dim)
        self.open: dict[int, CapturedGraph] = {}
        self.kept: dict[int, tuple[torch.Tensor, ...]] = {}
        self.captured_before: set[int] = set()
        self.replays: Counter[int] = Counter()
        self.refused: dict[int, Exception] = {}
        self.cut: Cut | NoCut | None = None
        self.written: tuple[str, ...] | None = None

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], int | NoGraphReason]:
        """The leaves of a call with its number of rows, or with the reason why no graph of this form fits."""
        return self.call.read(args, kwargs, self.sizes[-1])

    def refuse_overlap(self, other: FormGraphs) -> None:
        """Raise :class:`InputError` if a call could fit both forms."""
        shapes = self.call.shared_shapes(self.sizes[-1], other.call, other.sizes[-1])
        if shapes is not None:
            shown = ", ".join(map(str, shapes)) or "of no tensors"
            raise InputError(
                "each form must differ from the others in its nesting, its plain arguments, a dtype, or a shape apart "
                f"from the rows; found {self.call.text}\n"
                f"  a call with shapes {shown} also fits the form {other.call.text}\n"
                "  to fix: give all batch sizes of one form together"
            )

    def forget(self) -> None:
        """Drop the graphs and what was learned from them. The memory that they read is kept until :meth:`release`."""
        self.open.clear()
        self.refused.clear()
        self.cut = self.written = None

    def statistics(self) -> FormStatistics:
        """The calls of this form until now."""
        return FormStatistics(
            form=self.call.text,
            replays=dict(self.replays),
            memory_bytes={size: graph.receipt.memory_bytes for size, graph in self.open.items()},
            refused={size: str(error) for size, error in self.refused.items()},
            not_padded=self.cut.why if isinstance(self.cut, NoCut) else "",
        )


_Size = tuple[FormGraphs, int]

WatchMode = Literal["call", "hooks", "manual"]
"""Who looks whether the model is still the captured one: each call, interceptions and a clock, or the caller."""


class GraphSet:
    """The graphs of all forms in one pool, at most ``max_graphs``. The least recently used is closed first.

    The caller holds the lock.
    """

    def __init__(
        self, model: Model, backend: Backend, *, max_graphs: int | None, strict: bool, watch: WatchMode, tally: Tally
    ) -> None:
        self._model, self._backend, self._max_graphs = model, backend, max_graphs
        self._strict, self._tally = strict, tally
        self._checks_calls, self._replacements = watch != "manual", Replacements() if watch == "hooks" else None
        self.forms: list[FormGraphs] = []
        self._used: OrderedDict[_Size, None] = OrderedDict()
        self._pool = backend.pool()
        self._watch = ModelWatch(self._model)
        self._writes_parameters: bool | None = None
        """None before the first capture of this state of the model."""

    def add(self, form: FormGraphs, capture: bool) -> None:
        """Serve calls of this form too. Raises :class:`InputError` if a call could fit an earlier form."""
        for other in self.forms:
            form.refuse_overlap(other)
        self.forms.append(form)
        try:
            if capture:
                self.renew_if_changed()
                self._capture_all([(form, size) for size in reversed(form.sizes)])
        except BaseException:
            self.forms.remove(form)
            self._close(form)
            raise

    def find(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[FormGraphs, list[Any], int | NoGraphReason]:
        """The form that fits a call, with its leaves and its number of rows or the reason why none fits."""
        readings = [(form, *form.read(args, kwargs)) for form in self.forms]
        return max(readings, key=lambda each: _NEARNESS.get(each[2], 2 if isinstance(each[2], NoGraphReason) else 3))

    def at(self, form: FormGraphs, size: int) -> CapturedGraph | None:
        """The graph of one batch size, captured if there is none; None if its capture is refused.

        Raises :class:`~pytest_cudagraph.errors.CaptureRefusal` for a changed model if ``strict``.
        """
        if self._checks_calls and (self._replacements is None or self._replacements.is_due()):
            self.renew_if_changed()
        graph = form.open.get(size)
        if graph is None:
            return self._captured(form, size)
        if self._max_graphs is not None:
            self._used.move_to_end((form, size))
        return graph

    def recapture(self) -> None:
        """Drop all graphs and capture the same batch sizes again."""
        sizes = [*self._used, *((form, size) for form in self.forms for size in form.refused)]
        self.drop()
        self._capture_all(sorted(sizes, key=lambda each: -each[1]))

    def drop(self) -> None:
        """Close all graphs and watch the model in its present state."""
        self._release()
        self._pool = self._backend.pool()
        self._watch = ModelWatch(self._model)
        self._writes_parameters = None

    def close(self) -> None:
        """Release all graphs and what they read, and listen to no replacement any more."""
        if self._replacements is not None:
            self._replacements.close()
        self._release()

    def _release(self) -> None:
        self._used.clear()
        for form in self.forms:
            form.forget()
        try:
            self._pool.close()
        finally:
            for form in self.forms:
                form.kept.clear()  # after the pool, which waits for the last replay

    def renew_if_changed(self) -> bool:
        """Drop all graphs if the model has changed since their capture. Returns whether it has.

        Raises :class:`~pytest_cudagraph.errors.CaptureRefusal` for a changed model if ``strict``.
        """
        if not self._watch.has_changed():
            if self._replacements is not None:
                self._replacements.found_none()
            return False
        if self._strict:
            raise CaptureRefusal(
                "the model has changed since its capture, and a strict runner does not capture again in a call\n"
                + "".join(f"  found: {change}\n" for change in self._watch.changes())
                + "  to fix: write new values into the same tensors, with copy_() or zero_()\n"
                "  after an intended change call recapture()"
            )
        self._tally.state_changes += 1
        self.drop()
        return True

    def _capture_all(self, sizes: Iterable[_Size]) -> None:
        """Capture these, in this order, while the limit allows it."""
        for form, size in sizes:
            if self._max_graphs is None or len(self._used) < self._max_graphs:
                self._captured(form, size)

    def _captured(self, form: FormGraphs, size: int) -> CapturedGraph | None:
        if size in form.refused:
            return None
        self._make_room()
        started_ns = time.perf_counter_ns()
        try:
            return self._capture(form, size)
        except REFUSALS as error:
            if self._strict:
                raise
            form.refused[size] = error
            return None
        finally:
            self._tally.capture_ns += time.perf_counter_ns() - started_ns

    def _capture(self, form: FormGraphs, size: int) -> CapturedGraph:
        setup, example = form.setup, form.setup.example_at(size)
        if self._writes_parameters is None:
            self._writes_parameters = writes_parameters(setup.model, example, setup.backend)
        constants = NO_CONSTANTS if self._writes_parameters else Constants.take(setup.model)
        undo = Undo(setup.model, setup.backend, extras=opaque_arguments([example]), constants=constants)
        with undo.undone():
            arguments = example.args, example.kwargs
            graph = self._pool.capture(setup.model, *arguments, batch_size=size, rewind=undo.rewind)
        kept = undo.kept
        _refuse_to_write(form, undo, graph)
        if form.cut is None and size > 1 and form.call.has_rows and setup.pad is not False:
            form.cut = learn_cut(setup, undo, size)
        undo.assert_unchanged()
        form.open[size], form.kept[size] = graph, (*kept, *undo.replaced)
        self._used[form, size] = None
        self._tally.captures += 1
        self._tally.recaptures += size in form.captured_before
        form.captured_before.add(size)
        return graph

    def _make_room(self) -> None:
        while self._max_graphs is not None and len(self._used) >= self._max_graphs:
            form, size = next(iter(self._used))
            self._close_one(form, size)
            self._tally.evictions += 1

    def _close(self, form: FormGraphs) -> None:
        for size in list(form.open):
            self._close_one(form, size)

    def _close_one(self, form: FormGraphs, size: int) -> None:
        del self._used[form, size]
        form.open.pop(size).close()
        del form.kept[size]


def _refuse_to_write(form: FormGraphs, undo: Undo, graph: CapturedGraph) -> None:
    """Refuse a call that writes to an argument, because a replay would write to the graph's copy of it."""
    if form.written is None:
        form.written = written_arguments(form.setup, undo, graph.receipt.batch_size)
    if form.written:
        graph.close()
        raise CaptureRefusal(
            f"the call writes to its argument {form.written[0]}, and a replay would write to a copy of it",
            hazard="mutates-input",
            fix="clone the argument before writing to it, or keep what is updated as a buffer of the model",
        )
