"""Tune a model: make every combination of the grid ready, race the correct ones, report the best."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from pytest_cudagraph import device as devices
from pytest_cudagraph import inputs
from pytest_cudagraph.errors import InputError
from pytest_cudagraph.foreign import value_text
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.measure.sampling import HealthFilter
from pytest_cudagraph.protocols import Backend, Model
from pytest_cudagraph.serving import tuned_file
from pytest_cudagraph.serving.graph_runner import open_backend_for
from pytest_cudagraph.serving.tuning.grid import Combination, Grid, PreparedGrid, ReadyCombination
from pytest_cudagraph.serving.tuning.measurement import GridMeasurement, Objective
from pytest_cudagraph.serving.tuning.report import MeasuredCombination, TuningReport
from pytest_cudagraph.units import bytes_text, plural, to_ns
from pytest_cudagraph.values import CompileMode, is_emulated

Constraint = Callable[[ReadyCombination], bool]

_MODES = ("none", "inductor", "aot")


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

    A combination with a graph must pass audit, capture and check, a combination with compiled code the check. Others
    are reported with their reason. The combinations of each batch size race until the leader is known to be no worse
    than any other by more than ``tolerance``, and then the best of each batch size. ``time_budget_s`` limits the
    measuring, not the preparation. Each combination is measured ten times at least: if that takes longer, progress, log
    and report say so, before the first round. ``constraint`` gets a :class:`ReadyCombination` and says
    whether it may race. ``name`` is the key of :meth:`TuningReport.save`, by default the model's class. ``device``,
    ``batch_dim`` and ``kwargs`` as in :class:`~pytest_cudagraph.GraphRunner`.

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
        with PreparedGrid(grid=grid) as prepared:
            prepared.make_ready()
            _apply(constraint, prepared)
            measured = GridMeasurement(prepared, objective, tolerance, to_ns(time_budget_s), seed)
            measured.run()
            return _report(name, prepared, measured)


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


def _apply(constraint: Constraint | None, prepared: PreparedGrid) -> None:
    for combination, ready in list(prepared.ready.items()):
        if constraint is not None and not constraint(ready):
            memory = "" if ready.memory_bytes is None else f" (memory {bytes_text(ready.memory_bytes)})"
            prepared.failed[combination] = f"the constraint refuses it{memory}"
            del prepared.ready[combination]


def _report(name: str, prepared: PreparedGrid, measured: GridMeasurement) -> TuningReport:
    described = devices.describe(prepared.grid.backend.kind)
    results = {each: _measured(each, prepared, measured) for each in prepared.grid.combinations}
    objective = measured.objective if isinstance(measured.objective, str) else "a function"
    is_gpu = described.kind == "cuda" and not is_emulated(described.name)
    return TuningReport(
        name=name,
        device=described,
        model=tuned_file.fingerprint(prepared.grid.model),
        objective=objective,
        tolerance=measured.tolerance,
        combinations=tuple(results.values()),
        best=None if measured.best is None else results[measured.best],
        is_best_decided=measured.is_decided,
        measure_ns=measured.measure_ns,
        notes=(
            *_over_budget(measured),
            *_disturbed(measured.health),
            *(() if is_gpu else (_NO_GPU.format(described.name),)),
        ),
    )


_NO_GPU = "measured on {}: nothing here holds for a GPU"


def _over_budget(measured: GridMeasurement) -> list[str]:
    return [measured.over_budget] if measured.over_budget else []


def _disturbed(health: HealthFilter) -> list[str]:
    discarded = f"{plural(health.discarded, 'round')} discarded, because the device was disturbed"
    return [f"{discarded}: {', '.join(health.reasons)}"] if health.discarded else []


def _measured(combination: Combination, prepared: PreparedGrid, measured: GridMeasurement) -> MeasuredCombination:
    if combination not in prepared.ready:
        return MeasuredCombination(combination=combination, reason=prepared.failed[combination])
    readings, heat = measured.latencies_ns[combination], measured.heats[combination.batch_size]
    behind_logs = heat.behind_logs(combination)
    best_cost = measured.cost(heat.best, median(measured.latencies_ns[heat.best]))
    return MeasuredCombination(
        combination=combination,
        place=heat.places[combination],
        latency_ns=median(readings),
        cost=best_cost * math.exp(median(behind_logs)),
        behind_logs=behind_logs,
        samples=len(readings),
        memory_bytes=prepared.ready[combination].memory_bytes,
    )
