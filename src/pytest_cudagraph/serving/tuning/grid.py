"""The combinations of a grid, made ready to be timed: compiled, captured and checked, or left out with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pytest_cudagraph import audit
from pytest_cudagraph.compile import Compiled
from pytest_cudagraph.errors import CaptureRefusal
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.pipeline import stages
from pytest_cudagraph.pipeline.batch_timing import CallArguments, preparation
from pytest_cudagraph.pipeline.stages import PreparedCall, Stages
from pytest_cudagraph.protocols import Backend, Model
from pytest_cudagraph.serving.drop_in_statistics import cause_of
from pytest_cudagraph.values import CompileMode


class Combination(NamedTuple):
    """One combination of the parameters."""

    batch_size: int
    compile: CompileMode
    graph: bool

    def __str__(self) -> str:
        return f"batch {self.batch_size}, compile={self.compile!r}, {'graph' if self.graph else 'no graph'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyCombination:
    """A combination that gives eager's answers. ``call`` runs it once, and does not wait for the device."""

    combination: Combination
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
    def combinations(self) -> list[Combination]:
        """All combinations."""
        sizes = sorted(self.examples)
        return [
            Combination(size, mode, graph) for size in sizes for mode in self.compile_modes for graph in self.graphs
        ]


@dataclass(slots=True, kw_only=True)
class PreparedGrid:
    """What became of each combination: ready, or the reason why not.

    A context manager that releases all graphs and code.
    """

    grid: Grid
    ready: dict[Combination, ReadyCombination] = field(default_factory=dict)
    failed: dict[Combination, str] = field(default_factory=dict)
    arguments: dict[int, CallArguments] = field(default_factory=dict)
    _codes: dict[tuple[int, CompileMode], Compiled | Exception] = field(default_factory=dict)
    _held: list[PreparedCall] = field(default_factory=list)
    _resources: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> PreparedGrid:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.ready.clear()
        self._codes.clear()
        self._resources.close()
        self._held.clear()  # after the pools: the graphs read what it holds

    def make_ready(self) -> None:
        """Make every combination ready. An error of the model itself is raised, any other is a combination's reason."""
        grid = self.grid
        self.arguments = {size: CallArguments(example) for size, example in grid.examples.items()}
        with self.timing():  # calls the model at each batch size
            grid.backend.synchronize()
        hazard = self._hazard() if any(grid.graphs) else ""
        for combination in sorted(grid.combinations, key=lambda each: -each.batch_size):
            grid.progress(f"prepare {combination}")
            try:
                if combination.graph and hazard:
                    raise CaptureRefusal(hazard)
                self._prepare(combination)
            # Compilers, captures and replays may raise anything, also out-of-memory. The other combinations go on.
            except Exception as error:
                self.failed[combination] = cause_of(error)

    def _hazard(self) -> str:
        """The first error of the audit. A graph of such a model is refused or wrong."""
        grid = self.grid
        grid.progress("audit")
        smallest, *others = (grid.examples[size] for size in sorted(grid.examples))
        errors = audit.audit(grid.model, smallest, grid.backend, others[-1] if others else None).errors
        return f"the audit found {errors[0].id}: {errors[0].message}" if errors else ""

    def _prepare(self, combination: Combination) -> None:
        size, compiled = combination.batch_size, self._compiled(combination)
        pool = self._resources.enter_context(self.grid.backend.pool()) if combination.graph else None
        prepared = stages.prepare(self._stages, size, compiled, pool)
        self._held.append(prepared)
        self.ready[combination] = ReadyCombination(
            combination=combination,
            call=self.arguments[size].bound(prepared.call),
            memory_bytes=prepared.graph.receipt.memory_bytes if prepared.graph else 0,
        )

    def _compiled(self, combination: Combination) -> Compiled:
        """The code of a batch size and mode, compiled once for both of its combinations, or the error of that."""
        size, mode, _ = combination
        if (size, mode) not in self._codes:
            self._codes[size, mode] = self._compile(size, mode)
        compiled = self._codes[size, mode]
        if isinstance(compiled, Exception):
            raise compiled
        return compiled

    def _compile(self, size: int, mode: CompileMode) -> Compiled | Exception:
        grid = self.grid
        try:
            compiled = self._stages.at(size).compile(
                mode, cache_dir=grid.cache_dir, time_limit_s=grid.compile_timeout_s
            )
        # A compiler may raise anything.
        except Exception as error:
            return error
        return self._resources.enter_context(compiled)

    @property
    def _stages(self) -> Stages:
        return Stages(model=self.grid.model, examples=self.grid.examples, backend=self.grid.backend)

    @contextmanager
    def timing(self) -> Iterator[Callable[[], object] | None]:
        """The mode in which combinations are timed. Yields what restores the state before a sample, if any is changed.

        The state is restored at the end. Raises what the model itself raises.
        """
        grid = self.grid
        with self._stages.restored() as before, grid.backend.running():
            yield preparation(grid.model, before, list(self.arguments.values()))
