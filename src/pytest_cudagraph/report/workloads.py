"""The tests with the mark ``workload`` as cells that can be ranked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytest_cudagraph.baseline import change_of_sessions, session_of_arm
from pytest_cudagraph.report.table import device_text
from pytest_cudagraph.units import NS_PER_S
from pytest_cudagraph.values import BatchReport, GraphReport, Interval, Latency, LatencyChange, Session, Timing, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadTest:
    """A test with the mark ``workload``."""

    nodeid: str
    group: str
    name: str
    error: str | None = None
    """The first line of what ended the test. None where it passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadCell:
    """One workload at one batch size, called in one way. ``session`` is None where nothing valid was measured."""

    group: str
    workload: str
    batch_size: int | None
    way: str
    """``eager``, ``graph``, a compile mode, or one with a graph: ``inductor + graph``."""
    latency_ns: float | None = None
    """As in the table of the run."""
    session: Session | None = None
    """What a baseline would keep of it, to compare it."""
    measurement: tuple[str, int] | None = None
    """The name of the call and its batch size: ways of one measurement were timed in turn."""
    speedup: Interval | None = None
    """Of a graph, over eager, as it was judged."""
    over_eager_ratio: float | None = None
    """The same without bounds, also of compiled code."""
    attainable_ratio: float | None = None
    """The speedup over eager if launches took no time. Only of a graph."""
    memory_bytes: int | None = None
    """What its graph added to the memory pool. None without a graph."""
    reason: str = ""
    """Why there is no latency, or why the test failed."""
    is_judged: bool = True
    """False in a rehearsal, and with too few blocks for an interval of the speedup."""

    @property
    def key(self) -> tuple[str, str, int | None, str]:
        """What one run measures once."""
        return self.group, self.workload, self.batch_size, self.way

    @property
    def rows_per_s(self) -> float | None:
        """Rows per second. In a decode step, a row is a token."""
        return self.batch_size / self.latency_ns * NS_PER_S if self.latency_ns and self.batch_size else None

    def is_faster(self, other: WorkloadCell) -> bool:
        """Whether it is with confidence.

        Eager and graph of one measurement: by the interval of their speedup. Others: if a second session of ``other``
        would be above this one (:func:`pytest_cudagraph.baseline.change_of_sessions`).
        """
        if self.measurement is not None and self.measurement == other.measurement:
            if other.way == "eager" and self.speedup is not None:
                return self.speedup.low > 1.0
            if self.way == "eager" and other.speedup is not None:
                return other.speedup.high < 1.0
        moved = change(other, self)
        return moved is not None and moved.high_log < 0.0


def change(before: WorkloadCell | None, after: WorkloadCell | None) -> LatencyChange | None:
    """From one cell to another, as a baseline compares two sessions. None where one has no judged latency."""
    if before is None or after is None or before.session is None or after.session is None:
        return None
    if not (before.is_judged and after.is_judged):
        return None
    return change_of_sessions([before.session], after.session)


def cells_of(reports: Iterable[GraphReport], workloads: Iterable[WorkloadTest]) -> list[WorkloadCell]:
    """The cells of all workloads of a run, in the order of the tests. No test with the mark is left out."""
    tests: dict[str, list[GraphReport]] = {}
    for report in reports:
        tests.setdefault(report.nodeid, []).append(report)
    cells = [cell for each in workloads for cell in _cells(each, tests.get(each.nodeid, []))]
    # Eager is measured beside each compile mode of a model. The first one counts.
    timed = {cell.key: cell for cell in reversed(cells) if cell.session}
    return [cell for cell in cells if not cell.session or timed[cell.key] is cell]


def _cells(entry: WorkloadTest, reports: Sequence[GraphReport]) -> Iterator[WorkloadCell]:
    whole = WorkloadCell(group=entry.group, workload=entry.name, batch_size=None, way="-")
    for report in reports:
        # A test that measures more than one model names each.
        part = f": {report.name.rpartition('::')[2]}" if len(reports) > 1 else ""
        yield from _of_report(replace(whole, workload=entry.name + part), report)
    if entry.error and not any(report.verdict.fails for report in reports):
        yield replace(whole, reason=entry.error)
    elif not reports:
        yield replace(whole, reason="nothing was measured")


def _of_report(whole: WorkloadCell, report: GraphReport) -> Iterator[WorkloadCell]:
    mode = report.compile_mode
    graph = replace(whole, way="graph" if mode == "none" else f"{mode} + graph")
    for batch in report.batches:
        reason = f"{batch.word}: {batch.worst.reason}" if batch.verdict.fails and batch.worst else ""
        of_graph = replace(graph, batch_size=batch.batch_size, reason=reason, is_judged=_is_judged(batch))
        if batch.valid_timing is not None:
            yield from _of_batch(replace(of_graph, measurement=(report.name, batch.batch_size)), report, batch)
        else:
            yield replace(of_graph, reason=reason or "nothing was timed")
    if not report.batches:
        reasons = [each.reason for each in report.judgements if each.verdict is report.verdict]
        yield replace(graph, reason=": ".join([report.verdict.words, *reasons[:1]]))


def _is_judged(batch: BatchReport) -> bool:
    if batch.valid_timing is None or not _has_bounds(batch.valid_timing.speedup):
        return False
    return not any(each.gate == "speedup" and each.verdict is Verdict.NOT_JUDGED for each in batch.judgements)


def _has_bounds(speedup: Interval) -> bool:
    """Not with too few blocks."""
    return math.isfinite(speedup.high)


def _of_batch(of_graph: WorkloadCell, report: GraphReport, batch: BatchReport) -> Iterator[WorkloadCell]:
    """Eager, compiled code if there is any, and the graph."""
    timing, other = batch.timing, replace(of_graph, reason="")
    assert timing is not None
    medians = timing.medians
    yield replace(other, way="eager", **_arm(report, timing, timing.eager, medians.eager_ns))
    way = of_graph.way.removesuffix(" + graph")
    if timing.compiled is not None and medians.compiled_ns and way != of_graph.way:
        ratio = medians.eager_ns / medians.compiled_ns
        arm = _arm(report, timing, timing.compiled, medians.compiled_ns)
        yield replace(other, way=way, **arm, over_eager_ratio=ratio)
    yield replace(
        of_graph,
        **_arm(report, timing, timing.replay, medians.replay_ns),
        speedup=timing.speedup if _has_bounds(timing.speedup) else None,
        over_eager_ratio=timing.speedup.estimate,
        attainable_ratio=timing.attainable_ratio,
        memory_bytes=batch.receipt.memory_bytes if batch.receipt else None,
    )


def _arm(report: GraphReport, timing: Timing, latency: Latency, judged_ns: float) -> dict[str, Any]:
    device = report.device
    machine = f"{device_text(device)}, Python {device.python}" if device else ""
    return {"latency_ns": judged_ns, "session": session_of_arm(latency, timing.reference, machine)}


Ranks = tuple[int, int]
"""The first and the last rank that a cell may have."""


def ranks(cells: Sequence[WorkloadCell]) -> list[Ranks | None]:
    """The ranks of each cell among those of its group and batch size. None without a judged latency.

    The first is one more than the number of cells that are faster, the last is the number of those that are not slower.
    """
    ranked = [cell for cell in cells if cell.session and cell.is_judged]
    return [_ranks(cell, ranked) if cell in ranked else None for cell in cells]


def _ranks(cell: WorkloadCell, cells: Sequence[WorkloadCell]) -> Ranks:
    place = (cell.group, cell.batch_size)
    rivals = [each for each in cells if (each.group, each.batch_size) == place]
    faster, slower = sum(each.is_faster(cell) for each in rivals), sum(cell.is_faster(each) for each in rivals)
    return faster + 1, len(rivals) - slower
