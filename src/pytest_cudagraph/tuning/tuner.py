"""Tune a model: make every cell of the grid ready, race the correct ones, report the best and what decides."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal, cast

from pytest_cudagraph import device as devices
from pytest_cudagraph import inputs
from pytest_cudagraph.errors import InputError
from pytest_cudagraph.foreign import value_text
from pytest_cudagraph.gc_pause import gc_paused
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.measure import Bounds, PerfCounterClock
from pytest_cudagraph.measure.timer import ArmName, Timer, inner_calls, warm_up
from pytest_cudagraph.protocols import Backend, Model
from pytest_cudagraph.serving.graph_runner import open_backend_for
from pytest_cudagraph.stats import summaries
from pytest_cudagraph.tuning.cells import Grid, GridOfCells, ReadyCell, TuningCell
from pytest_cudagraph.tuning.impact import Levels, full_subgrid, impacts, noise_share
from pytest_cudagraph.tuning.race import RaceResult, race
from pytest_cudagraph.tuning.report import MeasuredCell, TuningReport, left_out_texts, of_size
from pytest_cudagraph.units import NS_PER_S, bytes_text, to_ns
from pytest_cudagraph.values import CompileMode, is_emulated

Objective = Literal["latency", "throughput"] | Callable[[int, float], float]
"""What is minimised: ns per call, ns per row, or a function of batch size and latency (ns) with a result above 0."""
Constraint = Callable[[ReadyCell], bool]

FACTORS = ("batch_size", "compile", "graph")
_MODES = ("none", "inductor", "aot")
_FINAL_SHARE = 0.2
"""Of the time budget, for the race between the best of each batch size."""
_LEAST_NS = 0.25 * NS_PER_S
_READINGS = 4
"""Of one cell in one round. Their lower quartile counts, as in a block of the speed gate."""


def tune(
    model: Model,
    *example_inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    batch_sizes: Sequence[int] = (1, 2, 4, 8),
    batch_dim: Any = 0,
    compile: Sequence[CompileMode] = ("none",),
    graph: Sequence[bool] = (True, False),
    objective: Objective = "throughput",
    constraint: Constraint | None = None,
    tolerance: float = 0.02,
    time_budget_s: float = 60.0,
    name: str | None = None,
    device: str = "auto",
    cache_dir: str | Path | None = None,
    compile_timeout_s: float = 600.0,
    seed: int = 0,
    backend: Backend | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> TuningReport:
    """Measure every combination of batch size, compile mode and graph, and find the best.

    A cell with a graph must pass audit, capture and check, a cell with compiled code the check. Others are reported
    with their reason. The cells of each batch size race until the leader is known to be no worse than any other by more
    than ``tolerance``, and then the best of each batch size. ``time_budget_s`` limits the measuring, but each cell is
    measured ten times. ``constraint`` gets a :class:`ReadyCell` and says whether it may race. ``name`` is the key of
    :meth:`TuningReport.save`, by default the model's class. ``device``, ``batch_dim`` and ``kwargs`` as in
    :class:`~pytest_cudagraph.GraphRunner`.

    Raises :class:`~pytest_cudagraph.errors.InputError` for unusable arguments, and what the model itself raises.
    """
    __tracebackhide__ = True
    example = Example(args=example_inputs, kwargs=dict(kwargs or {}))
    examples = inputs.batch_examples(example, batch_sizes, batch_dim)
    return tune_examples(
        model, examples, backend or open_backend_for(device, example),
        compile=compile, graph=graph, objective=objective, constraint=constraint, tolerance=tolerance,
        time_budget_s=time_budget_s, name=name or type(model).__name__, cache_dir=cache_dir,
        compile_timeout_s=compile_timeout_s, seed=seed, progress=progress,
    )  # fmt: skip


def tune_examples(
    model: Model,
    examples: Mapping[int, Example],
    backend: Backend,
    *,
    name: str,
    compile: Sequence[CompileMode] = ("none",),
    graph: Sequence[bool] = (True, False),
    objective: Objective = "throughput",
    constraint: Constraint | None = None,
    tolerance: float = 0.02,
    time_budget_s: float = 60.0,
    cache_dir: str | Path | None = None,
    compile_timeout_s: float = 600.0,
    seed: int = 0,
    progress: Callable[[str], None] = lambda line: None,
) -> TuningReport:
    """As :func:`tune`, with one example for each batch size, on the device of the backend."""
    __tracebackhide__ = True
    _check_options(compile, graph, objective, tolerance, time_budget_s)
    with tempfile.TemporaryDirectory(prefix="pytest-cudagraph-", ignore_cleanup_errors=True) as folder:
        grid = Grid(
            model=model, examples=examples, compile_modes=tuple(dict.fromkeys(compile)),
            graphs=tuple(dict.fromkeys(graph)), backend=backend, cache_dir=Path(cache_dir or folder),
            compile_timeout_s=compile_timeout_s, progress=progress,
        )  # fmt: skip
        with GridOfCells(grid=grid) as cells:
            cells.make_ready()
            _apply(constraint, cells)
            measured = _Measurement(cells, objective, tolerance, to_ns(time_budget_s), seed)
            measured.run()
            return _report(name, cells, measured)


def _check_options(compile: Any, graph: Any, objective: Any, tolerance: float, time_budget_s: float) -> None:
    __tracebackhide__ = True
    if not _is_list_of(compile, lambda mode: isinstance(mode, str) and mode in _MODES):
        raise InputError(f"compile takes a list of {', '.join(map(repr, _MODES))}; found {value_text(compile)}")
    if not _is_list_of(graph, lambda flag: isinstance(flag, bool)):
        raise InputError(f"graph takes a list of True and False; found {value_text(graph)}")
    if not callable(objective) and not (isinstance(objective, str) and objective in ("latency", "throughput")):
        raise InputError(f"objective is 'latency', 'throughput' or a function; found {value_text(objective)}")
    if not isinstance(tolerance, int | float) or not 0.0 < tolerance < 1.0:
        raise InputError(f"tolerance is a fraction above 0 and below 1; found {value_text(tolerance)}")
    if not isinstance(time_budget_s, int | float) or not 0.0 < time_budget_s < math.inf:
        raise InputError(f"time_budget_s is a number of seconds above 0; found {value_text(time_budget_s)}")


def _is_list_of(values: Any, is_one: Callable[[Any], bool]) -> bool:
    return isinstance(values, list | tuple) and bool(values) and all(map(is_one, values))


def _apply(constraint: Constraint | None, cells: GridOfCells) -> None:
    for cell, ready in list(cells.ready.items()):
        if constraint is not None and not constraint(ready):
            memory = "" if ready.memory_bytes is None else f" (memory {bytes_text(ready.memory_bytes)})"
            cells.failed[cell] = f"the constraint refuses it{memory}"
            del cells.ready[cell]


class _Measurement:
    """The races of one grid: one for each batch size, then one of their winners."""

    def __init__(self, cells: GridOfCells, objective: Objective, tolerance: float, budget_ns: float, seed: int) -> None:
        self._cells, self.objective, self.tolerance = cells, objective, tolerance
        self._budget_ns, self._seed, self._clock = budget_ns, seed, PerfCounterClock()
        self._timers: dict[int, Timer] = {}
        self.latencies_ns: dict[TuningCell, list[float]] = {cell: [] for cell in cells.ready}
        self.heats: dict[int, RaceResult[TuningCell]] = {}
        self.final: RaceResult[TuningCell] | None = None
        self.measure_ns = 0.0

    def run(self) -> None:
        """Measure everything that is ready."""
        sizes = sorted({cell.batch_size for cell in self._cells.ready})
        if not sizes:
            return
        begin_ns = time.perf_counter_ns()
        share_ns = self._budget_ns * (1.0 - _FINAL_SHARE if len(sizes) > 1 else 1.0) / len(sizes)
        with self._cells.timing() as prepare, gc_paused():
            for size in sizes:
                self._cells.grid.progress(f"measure batch {size}")
                self._timers[size] = self._timer(size, share_ns, prepare)
                self.heats[size] = self._race(of_size(self._cells.ready, size), share_ns)
            if len(sizes) > 1:
                self._cells.grid.progress("measure the best of each batch size")
                winners = [heat.best for heat in self.heats.values()]
                self.final = self._race(winners, self._budget_ns * _FINAL_SHARE)
        self.measure_ns = time.perf_counter_ns() - begin_ns

    @property
    def best(self) -> TuningCell | None:
        """The best of all."""
        last = self.final or next(iter(self.heats.values()), None)
        return last.best if last else None

    @property
    def is_decided(self) -> bool:
        """Whether no race ended with an undecided place."""
        races = [*self.heats.values(), *([self.final] if self.final else [])]
        return bool(races) and not any("undecided" in each.places.values() for each in races)

    def cost(self, cell: TuningCell, latency_ns: float) -> float:
        """By the objective. Raises :class:`~pytest_cudagraph.errors.InputError` for one that is not above zero."""
        if self.objective == "latency":
            return latency_ns
        if self.objective == "throughput":
            return latency_ns / cell.batch_size
        cost = self.objective(cell.batch_size, latency_ns)
        if not 0.0 < cost < math.inf:
            raise InputError(f"an objective gives a finite number above 0; found {value_text(cost)} for {cell}")
        return float(cost)

    def _timer(self, size: int, share_ns: float, prepare: Callable[[], None] | None) -> Timer:
        ready = self._cells.ready
        timer = Timer(
            calls={_arm(cell): ready[cell].call for cell in of_size(ready, size)},
            clock=self._clock,
            synchronize=self._cells.grid.backend.synchronize,
            bounds=Bounds.of_budget(share_ns),
            prepare=prepare,
        )
        warm_ns = warm_up(timer)
        if prepare is None:  # a second call would not start from the restored state
            timer.inner_calls = inner_calls(self._clock, min(min(each) for each in warm_ns.values()))
        return timer

    def _race(self, candidates: list[TuningCell], budget_ns: float) -> RaceResult[TuningCell]:
        begin_ns = time.perf_counter_ns()
        # A decision after less would fall within one burst of a noisy neighbour (docs/statistics.md).
        least_ns = min(_LEAST_NS, budget_ns / 4)
        return race(
            candidates,
            self._sample,
            may_settle=lambda: time.perf_counter_ns() - begin_ns >= least_ns,
            is_over=lambda rounds: time.perf_counter_ns() - begin_ns >= budget_ns,
            seed=self._seed,
            # The best of all is within it of the best of its batch size, which is within it of the others.
            tolerance=self.tolerance / 2,
        )

    def _sample(self, cell: TuningCell) -> float:
        timer = self._timers[cell.batch_size]
        latency_ns = summaries.quantile([timer.sample_ns(_arm(cell)) for _ in range(_READINGS)], 0.25)
        self.latencies_ns[cell].append(latency_ns)
        return self.cost(cell, latency_ns)


def _arm(cell: TuningCell) -> ArmName:
    return cast(ArmName, str(cell))


def _report(name: str, cells: GridOfCells, measured: _Measurement) -> TuningReport:
    described = devices.describe(cells.grid.backend.kind)
    found = {cell: _cell(cell, cells, measured) for cell in cells.grid.cells}
    logs: dict[Levels, list[float]] = {
        cell: logs for heat in measured.heats.values() for cell, logs in heat.log_costs.items()
    }
    present, left_out = full_subgrid(list(logs))
    kept = {levels: logs[levels] for levels in present}
    objective = measured.objective if isinstance(measured.objective, str) else "a function"
    is_gpu = described.kind == "cuda" and not is_emulated(described.name)
    return TuningReport(
        name=name,
        device=described,
        objective=objective,
        tolerance=measured.tolerance,
        cells=tuple(found.values()),
        best=None if measured.best is None else found[measured.best],
        is_best_decided=measured.is_decided,
        impacts=tuple(impacts(FACTORS, {levels: median(each) for levels, each in kept.items()})) if kept else (),
        noise_share=noise_share(kept) if kept else 0.0,
        left_out=left_out_texts(FACTORS, left_out),
        measure_ns=measured.measure_ns,
        notes=() if is_gpu else (f"measured on {described.name}: nothing here holds for a GPU",),
    )


def _cell(cell: TuningCell, cells: GridOfCells, measured: _Measurement) -> MeasuredCell:
    if cell not in cells.ready:
        return MeasuredCell(cell=cell, reason=cells.failed[cell])
    readings = measured.latencies_ns[cell]
    latency_ns = median(readings)
    return MeasuredCell(
        cell=cell,
        place=measured.heats[cell.batch_size].places[cell],
        latency_ns=latency_ns,
        cost=measured.cost(cell, latency_ns),
        samples=len(readings),
        memory_bytes=cells.ready[cell].memory_bytes,
    )
