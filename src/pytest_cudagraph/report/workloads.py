"""The tests with the mark ``workload`` as cells that can be ranked, from the values of the JSON document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytest_cudagraph.baseline import change_of_sessions, session_of_arm
from pytest_cudagraph.report.document_rows import device_of_document
from pytest_cudagraph.units import NS_PER_S, to_ns
from pytest_cudagraph.values import Interval, Latency, LatencyChange, Session, Verdict


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
        found = change(other, self)
        return found is not None and found.high_log < 0.0


def change(before: WorkloadCell | None, after: WorkloadCell | None) -> LatencyChange | None:
    """From one cell to another, as a baseline compares two sessions. None where one has no judged latency."""
    if before is None or after is None or before.session is None or after.session is None:
        return None
    if not (before.is_judged and after.is_judged):
        return None
    return change_of_sessions([before.session], after.session)


def cells_of(document: Mapping[str, Any]) -> list[WorkloadCell]:
    """The cells of all workloads of a run, in the order of the tests. No test with the mark is left out.

    Raises :class:`ValueError` for a damaged document.
    """
    try:
        tests: dict[str, list[Mapping[str, Any]]] = {}
        for test in document["tests"]:
            tests.setdefault(test["nodeid"], []).append(test)
        machine = f"{device_of_document(document)}, Python {(document['device'] or {}).get('python')}"
        found: list[WorkloadCell] = []
        for each in document.get("workloads", ()):
            found += _cells(each, tests.get(each["nodeid"], []), machine)
    except (KeyError, TypeError, AttributeError, ArithmeticError) as exc:
        raise ValueError(f"damaged: {exc!r}") from exc
    # Eager is measured beside each compile mode of a model. The first one counts.
    timed = {cell.key: cell for cell in reversed(found) if cell.session}
    return [cell for cell in found if not cell.session or timed[cell.key] is cell]


def _cells(entry: Mapping[str, Any], tests: Sequence[Mapping[str, Any]], machine: str) -> Iterator[WorkloadCell]:
    whole = WorkloadCell(group=entry["group"], workload=entry["name"], batch_size=None, way="-")
    for test in tests:
        # A test that measures more than one model names each.
        part = f": {str(test['name']).rpartition('::')[2]}" if len(tests) > 1 else ""
        yield from _of_test(replace(whole, workload=entry["name"] + part), test, machine)
    if entry["error"] and not any(Verdict(test["verdict"]).fails for test in tests):
        yield replace(whole, reason=entry["error"])
    elif not tests:
        yield replace(whole, reason="nothing was measured")


def _of_test(whole: WorkloadCell, test: Mapping[str, Any], machine: str) -> Iterator[WorkloadCell]:
    mode = test["compile_mode"]
    graph = replace(whole, way="graph" if mode == "none" else f"{mode} + graph")
    for batch in test["batches"]:
        reason = f"{batch['word']}: {batch['reason']}" if Verdict(batch["verdict"]).fails else ""
        of_graph = replace(graph, batch_size=batch["batch_size"], reason=reason, is_judged=_is_judged(batch))
        if batch["replay"] and batch["replay"]["q25"]:
            yield from _of_batch(replace(of_graph, measurement=(test["name"], batch["batch_size"])), batch, machine)
        else:
            yield replace(of_graph, reason=reason or "nothing was timed")
    if not test["batches"]:
        reasons = [each["reason"] for each in test["judgements"] if each["verdict"] == test["verdict"]]
        yield replace(graph, reason=": ".join([test["verdict"].replace("-", " "), *reasons[:1]]))


def _is_judged(batch: Mapping[str, Any]) -> bool:
    speedup, judgements = batch["speedup"], batch.get("judgements", ())  # of earlier versions none
    if speedup is None or None in speedup.values():
        return False
    return not any(each["gate"] == "speedup" and each["verdict"] == Verdict.NOT_JUDGED.value for each in judgements)


def _of_batch(of_graph: WorkloadCell, batch: Mapping[str, Any], machine: str) -> Iterator[WorkloadCell]:
    """Eager, compiled code if there is any, and the graph."""
    other = replace(of_graph, reason="")
    yield replace(other, way="eager", **_arm(batch, "eager", machine))
    way = of_graph.way.removesuffix(" + graph")
    if batch["compiled"] and way != of_graph.way:
        ratio = _judged_s(batch["eager"]) / _judged_s(batch["compiled"])
        yield replace(other, way=way, **_arm(batch, "compiled", machine), over_eager_ratio=ratio)
    speedup = batch["speedup"]
    yield replace(
        of_graph,
        **_arm(batch, "replay", machine),
        # A bound is null if there were too few blocks for it.
        speedup=None if None in speedup.values() else Interval(**speedup),
        over_eager_ratio=speedup["estimate"],
        attainable_ratio=batch.get("attainable_speedup"),
        memory_bytes=batch["memory_bytes"],
    )


def _arm(batch: Mapping[str, Any], arm: str, machine: str) -> dict[str, Any]:
    reference = batch.get("reference")
    session = session_of_arm(_latency(batch[arm]), _latency(reference) if reference else None, machine)
    return {"latency_ns": to_ns(_judged_s(batch[arm])), "session": session}


def _judged_s(found: Mapping[str, Any]) -> float:
    # Documents of earlier versions have only the median of all samples.
    return float(found.get("judged") or found["median"])


def _latency(found: Mapping[str, Any]) -> Latency:
    q25_ns, median_ns = to_ns(found["q25"]), to_ns(found["median"])
    # Documents of earlier versions have no upper quartile.
    q75_ns = to_ns(found["q75"]) if found.get("q75") else median_ns * median_ns / q25_ns
    return Latency(
        samples=found["samples"], minimum_ns=q25_ns, q25_ns=q25_ns, median_ns=median_ns, q75_ns=q75_ns, q90_ns=q75_ns
    )


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
