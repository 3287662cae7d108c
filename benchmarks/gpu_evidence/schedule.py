"""What is measured, in order of priority, within a limit: what does not fit any more is left out and said."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu_evidence import extras
from benchmarks.gpu_evidence.arms import ALL, LIGHT, NotAvailable
from benchmarks.gpu_evidence.cells import Cell, Lab, measure_cell, reason_of
from benchmarks.models.definitions import MODELS

_GROUPS = ((1, 8), (32, 96), (2, 4))
_COMPILED_EARLY = 2
"""Compilers take a minute per model: two models early, the others with the time that is left."""

_TARGET_RATIO = 1.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One entry of the schedule. ``goes_to`` is the key of the document that takes its result."""

    name: str
    goes_to: str
    expected_s: float
    run: Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much of everything: the figures of a GPU run, or those of a rehearsal."""

    batch_sizes: tuple[int, ...]
    cell_s: float
    """Expected seconds of a cell without compilers."""
    compiled_cell_s: float
    overhead_s: float
    monitor_s: float
    alarms: int
    alarms_s: float
    trace_s: float
    trace_rows: int
    folder_of_traces: Any
    compiled_models: tuple[str, ...]


def timed(lab: Lab, extent: Extent) -> list[Step]:
    """Everything that is timed, the most telling first: without compilers at the sizes people serve, then the rest.

    Compilers come after what is short and certain: they may take all the time there is, or leave the GPU unusable.
    """
    first, second, third = _groups(extent.batch_sizes)
    compiled = [_cell(lab, extent, model, 1, ALL) for model in extent.compiled_models]
    return [
        *_light(lab, extent, first),
        _overhead(lab, extent),
        _monitor(lab, extent),
        *(_verdict(lab, model) for model in ("classifier", "encoder", "resnet50")),
        _alarms(lab, extent),
        _traces(lab, extent),
        *_light(lab, extent, second),
        *compiled[:_COMPILED_EARLY],
        *_light(lab, extent, third),
        *compiled[_COMPILED_EARLY:],
    ]


def profiled(lab: Lab, extent: Extent) -> list[Step]:
    """Kernel times. Once loaded, the profiler's library costs time at every launch."""
    sizes = [size for group in _groups(extent.batch_sizes) for size in group]
    return [_kernel_time(lab, model, size) for size in sizes for model in MODELS]


def _groups(sizes: tuple[int, ...]) -> list[list[int]]:
    """1 and 8 first, then the large ones, then those in between."""
    return [[size for size in group if size in sizes] for group in _GROUPS]


def _light(lab: Lab, extent: Extent, sizes: list[int]) -> list[Step]:
    return [_cell(lab, extent, model, size, LIGHT) for size in sizes for model in MODELS]


def _overhead(lab: Lab, extent: Extent) -> Step:
    return Step(
        name="cost of our replay call",
        goes_to="overhead",
        expected_s=extent.overhead_s + 3,
        run=lambda: extras.call_overhead(lab, _small(), extent.overhead_s),
    )


def _monitor(lab: Lab, extent: Extent) -> Step:
    return Step(
        name="cost of the monitor",
        goes_to="monitor",
        expected_s=extent.monitor_s + 3,
        run=lambda: extras.monitor_cost(lab, _small(), extent.monitor_s),
    )


def _small() -> Cell:
    return Cell(model="classifier", batch_size=1, arms=LIGHT)


def _cell(lab: Lab, extent: Extent, model: str, size: int, arms: tuple[str, ...]) -> Step:
    cell = Cell(model=model, batch_size=size, arms=arms)
    expected_s = extent.compiled_cell_s if arms == ALL else extent.cell_s
    return Step(name=str(cell), goes_to="cells", expected_s=expected_s, run=lambda: measure_cell(lab, cell))


def _verdict(lab: Lab, model: str) -> Step:
    cell = Cell(model=model, batch_size=1, arms=LIGHT)
    return Step(
        name=f"time to verdict: {model}",
        goes_to="verdicts",
        expected_s=5,
        run=lambda: extras.verdict_time(lab, cell, _TARGET_RATIO),
    )


def _alarms(lab: Lab, extent: Extent) -> Step:
    return Step(
        name="false alarms of the gate (A/A)",
        goes_to="false_alarms",
        expected_s=extent.alarms_s,
        run=lambda: extras.false_alarms(lab, _small(), extent.alarms, extent.alarms_s),
    )


def _traces(lab: Lab, extent: Extent) -> Step:
    small, large = _small(), Cell(model="resnet50", batch_size=8, arms=LIGHT)
    wanted = {
        "classifier_1_AA": (small, "replay", "replay"),
        "classifier_1_AB": (small, "eager", "replay"),
        "encoder_1_AB": (Cell(model="encoder", batch_size=1, arms=LIGHT), "eager", "replay"),
        "resnet50_8_AA": (large, "replay", "replay"),
    }
    return Step(
        name="timing traces",
        goes_to="traces",
        expected_s=len(wanted) * (extent.trace_s + 1.5),
        run=lambda: extras.traces(lab, wanted, extent.trace_s, extent.trace_rows, extent.folder_of_traces),
    )


def _kernel_time(lab: Lab, model: str, size: int) -> Step:
    cell = Cell(model=model, batch_size=size, arms=LIGHT)
    return Step(
        name=f"kernel time: {model} at batch {size}",
        goes_to="kernel_time",
        expected_s=2.5,
        run=lambda: extras.kernel_time(lab, cell),
    )


def run(steps: list[Step], document: dict[str, Any], *, ends_s: float, after_step: Callable[[str], None]) -> None:
    """Run what fits until ``ends_s`` (of the performance counter); what fails or does not fit is written down."""
    for step in steps:
        left_s = ends_s - time.perf_counter()
        if step.expected_s > left_s:
            document["left_out"].append(f"{step.name}: expected {step.expected_s:.0f} s, {max(left_s, 0):.0f} s left")
            continue
        began_s = time.perf_counter()
        try:
            _keep(document, step.goes_to, step.run())
            outcome = "done"
        except NotAvailable as reason:
            outcome = str(reason)
            document["left_out"].append(f"{step.name}: {outcome}")
        except Exception as error:  # one figure less, and said; never the end of the run
            outcome = reason_of(error)
            document["failures"].append(f"{step.name}: {outcome}")
        after_step(f"{step.name}: {outcome}, {time.perf_counter() - began_s:.1f} s")


def _keep(document: dict[str, Any], key: str, found: Any) -> None:
    if not isinstance(document[key], list):
        document[key] = found
    elif isinstance(found, list):
        document[key] += found
    else:
        document[key].append(found)
