"""The cells of a grid, made ready to be timed: compiled, captured and checked, or left out with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pytest_cudagraph import audit, pytree
from pytest_cudagraph.capture import capture_batches
from pytest_cudagraph.compile import Compiled, compile_model
from pytest_cudagraph.errors import CaptureRefusal
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.inputs.example import opaque_arguments
from pytest_cudagraph.pipeline.batch_timing import CallArguments
from pytest_cudagraph.protocols import Backend, Model
from pytest_cudagraph.serving.drop_in_statistics import cause_of
from pytest_cudagraph.serving.graph_check import CompiledAsGraph, difference_from_eager
from pytest_cudagraph.state import Snapshot, Undo
from pytest_cudagraph.values import CompileMode


class TuningCell(NamedTuple):
    """One combination of the parameters."""

    batch_size: int
    compile: CompileMode
    graph: bool

    def __str__(self) -> str:
        return f"batch {self.batch_size}, compile={self.compile!r}, {'graph' if self.graph else 'no graph'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyCell:
    """A cell that gives eager's answers. ``call`` runs it once, and does not wait for the device."""

    cell: TuningCell
    call: Callable[[], object]
    memory_bytes: int | None
    """What its graph added to the memory pool. 0 without a graph, None where the device cannot tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A model, its examples, and the parameters to be combined."""

    model: Model
    examples: Mapping[int, Example]
    compile_modes: Sequence[CompileMode]
    graphs: Sequence[bool]
    backend: Backend
    cache_dir: Path
    compile_timeout_s: float
    progress: Callable[[str], None]

    @property
    def cells(self) -> list[TuningCell]:
        """All combinations."""
        sizes = sorted(self.examples)
        return [TuningCell(size, mode, graph) for size in sizes for mode in self.compile_modes for graph in self.graphs]


@dataclass(slots=True, kw_only=True)
class GridOfCells:
    """What became of each cell: ready, or the reason why not. A context manager that releases all graphs and code."""

    grid: Grid
    ready: dict[TuningCell, ReadyCell] = field(default_factory=dict)
    failed: dict[TuningCell, str] = field(default_factory=dict)
    arguments: dict[int, CallArguments] = field(default_factory=dict)
    _codes: dict[tuple[int, CompileMode], Compiled | Exception] = field(default_factory=dict)
    _resources: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> GridOfCells:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.ready.clear()
        self._codes.clear()
        self._resources.close()

    def make_ready(self) -> None:
        """Make every cell ready. An error of the model itself is raised; any other is the reason of its cell."""
        grid = self.grid
        self._call_eagerly()
        hazard = self._hazard() if any(grid.graphs) else ""
        for size in sorted(grid.examples, reverse=True):
            for mode in grid.compile_modes:
                for graph in grid.graphs:
                    cell = TuningCell(size, mode, graph)
                    grid.progress(f"prepare {cell}")
                    with self._reason_for(cell):
                        if graph and hazard:
                            raise CaptureRefusal(hazard)
                        self._prepare(cell)

    @contextmanager
    def _reason_for(self, cell: TuningCell) -> Iterator[None]:
        try:
            yield
        # Compilers, captures and replays may raise anything, also out-of-memory. The other cells go on.
        except Exception as error:
            self.failed[cell] = cause_of(error)

    def _call_eagerly(self) -> None:
        grid = self.grid
        with self._undo(grid.examples).undone(), grid.backend.running():
            for size, example in grid.examples.items():
                self.arguments[size] = arguments = CallArguments(example)
                grid.model(*arguments.args, **arguments.kwargs)
                arguments.look()
        grid.backend.synchronize()

    def _hazard(self) -> str:
        """The first error of the audit. A graph of such a model is refused or wrong."""
        grid = self.grid
        grid.progress("audit")
        smallest, *others = (grid.examples[size] for size in sorted(grid.examples))
        found = audit.audit(grid.model, smallest, grid.backend, others[-1] if others else None).errors
        return f"the audit found {found[0].id}: {found[0].message}" if found else ""

    def _prepare(self, cell: TuningCell) -> None:
        grid, size = self.grid, cell.batch_size
        example = {size: grid.examples[size]}
        compiled = self._compiled(cell, example)
        call = compiled.call_for(size)
        memory_bytes: int | None = 0
        if cell.graph:
            pool = self._resources.enter_context(grid.backend.pool())
            captures = capture_batches(
                compiled.call_for, example, pool, model=grid.model, backend=grid.backend,
                executions=compiled.executions,
            )  # fmt: skip
            if captures.refused is not None:
                raise captures.refused
            self._resources.callback(lambda kept: None, captures)  # graphs read memory that it holds
            graph = captures.graphs[size]
            self._check(graph, call, size)
            call, memory_bytes = graph, graph.receipt.memory_bytes
        elif cell.compile != "none":
            self._check(CompiledAsGraph(call, size), call, size)
        self.ready[cell] = ReadyCell(cell=cell, call=self._without_arguments(call, size), memory_bytes=memory_bytes)

    def _compiled(self, cell: TuningCell, example: Mapping[int, Example]) -> Compiled:
        """The code of a batch size and mode, compiled once for both of its cells. Raises the error of that compile."""
        key = (cell.batch_size, cell.compile)
        if key not in self._codes:
            try:
                self._codes[key] = self._compile(cell.compile, example)
            # A compiler may raise anything.
            except Exception as error:
                self._codes[key] = error
        found = self._codes[key]
        if isinstance(found, Exception):
            raise found
        return found

    def _compile(self, mode: CompileMode, example: Mapping[int, Example]) -> Compiled:
        grid = self.grid
        with self._undo(example).undone():
            compiled = compile_model(
                grid.model, example, mode, grid.backend, cache_dir=grid.cache_dir, time_limit_s=grid.compile_timeout_s
            )
            return self._resources.enter_context(compiled)

    def _check(self, graph: Any, call: Model, size: int) -> None:
        grid = self.grid
        difference = difference_from_eager(graph, call, grid.model, grid.examples[size], grid.backend)
        if difference:
            raise CaptureRefusal(difference)

    def _without_arguments(self, call: Model, size: int) -> Callable[[], object]:
        arguments = self.arguments[size]
        if arguments.is_changed:
            return lambda: call(*arguments.args, **arguments.kwargs)
        args, kwargs = arguments.args, arguments.kwargs
        return lambda: call(*args, **kwargs)

    def _undo(self, examples: Mapping[int, Example]) -> Undo:
        return Undo(self.grid.model, self.grid.backend, extras=opaque_arguments(examples.values()))

    @contextmanager
    def timing(self) -> Iterator[Callable[[], None] | None]:
        """The mode in which cells are timed. Yields what restores the state before a sample; None without state.

        The state is restored at the end.
        """
        grid = self.grid
        before = Snapshot.take(grid.model, extras=opaque_arguments(grid.examples.values()))
        rng = grid.backend.rng_state()
        try:
            with grid.backend.running():
                yield self._rewind(before)
        finally:
            before.restore()
            grid.backend.set_rng_state(rng)

    def _rewind(self, before: Snapshot) -> Callable[[], None] | None:
        example = self.grid.examples[min(self.grid.examples)]
        args, kwargs = pytree.map_tensors(lambda tensor: tensor, (example.args, example.kwargs))
        self.grid.model(*args, **kwargs)
        written = before.changes().written
        changed = [each for each in self.arguments.values() if each.is_changed]
        if not written and not changed:
            return None
        rewind = before.rewinder(written)

        def prepare() -> None:
            for each in changed:
                each.renew()
            rewind()

        return prepare
