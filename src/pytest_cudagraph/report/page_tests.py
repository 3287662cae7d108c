"""What the HTML page shows of each test: the rows of the table, its plots, its judgements, its measurement."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_cudagraph.report.document import change_since_saved
from pytest_cudagraph.report.plots import (
    LatencyLane,
    SessionLane,
    SpeedupPoint,
    drawn,
    history_plot,
    latency_plot,
    speedup_plot,
    speedup_scale,
)
from pytest_cudagraph.report.table import Row, cells_of, columns_of, notes_of
from pytest_cudagraph.units import bytes_text, factor_text, percent_text, plural, seconds_text, signed_text
from pytest_cudagraph.values import BatchReport, GraphReport, Judgement, SavedBatch, Timing, Verdict

if TYPE_CHECKING:
    from markupsafe import Markup

_OPEN = 20
"""Failing tests that are unfolded. With more of them a page is read by its table."""

_KINDS = {"passed": "ok", "inconclusive": "warn", "not judged": "none", "no baseline yet": "none"}

FACTS = ("batch", "kernels", "memory", "capture", "noise", "detectable", "blocks", "since saved", "check")
"""The titles of the table of measurements."""

_NONE = "-"


def kind_of(word: str) -> str:
    """The colour of a verdict's word: ``ok``, ``warn``, ``none`` or ``bad``."""
    return _KINDS.get(word, "bad")


class PageRow(NamedTuple):
    """One row of the table: a batch size of a test."""

    number: int
    """Of the test in the document, which is the anchor of its details."""
    again: bool
    """Whether the row above is of the same test."""
    folder: str
    test: str
    cells: Mapping[str, str]
    """By the titles of the terminal's table."""
    mark: Markup | str
    limit: str
    kind: str
    word: str
    notes: Sequence[str]


def page_rows(reports: Sequence[GraphReport], rows: Sequence[Row]) -> list[PageRow]:
    """The table. ``rows`` are those of the reports, in their order."""
    places = [(number, batch) for number, report in enumerate(reports) for batch in report.batches or (None,)]
    points = [_point(batch) for _, batch in places]
    mark = speedup_scale(point for point in points if point)
    shown, last = [], -1
    for (number, batch), point, row in zip(places, points, rows, strict=True):
        shown.append(_row(number, row, batch, drawn(mark(point)) if point else "", again=number == last))
        last = number
    return shown


def _row(number: int, row: Row, batch: BatchReport | None, mark: Markup | str, *, again: bool) -> PageRow:
    cells = dict(
        zip((each.title for each in columns_of(True)), cells_of(row, compiled=True, interval=True), strict=True)
    )
    file, separator, test = row.test.partition("::")
    timing = batch.valid_timing if batch else None
    limit = timing.attainable_ratio if timing else None
    return PageRow(
        number=number,
        again=again,
        folder=file + separator if separator else "",
        test=test or file,
        cells=cells,
        mark=mark,
        limit=factor_text(limit) if limit else "",
        kind=kind_of(row.word),
        word=row.word,
        notes=notes_of(row),
    )


def _point(batch: BatchReport | None) -> SpeedupPoint | None:
    timing = batch.valid_timing if batch else None
    if batch is None or timing is None or not timing.speedup.estimate:
        return None
    speedup = timing.speedup
    return SpeedupPoint(
        batch_size=batch.batch_size, estimate=speedup.estimate, low=speedup.low, high=speedup.high,
        target=batch.min_speedup, attainable=timing.attainable_ratio,
    )  # fmt: skip


def page_tests(reports: Sequence[GraphReport], *, folded: bool) -> list[dict[str, Any]]:
    """Each test with its details, the worst first. Failing tests are unfolded unless the page is ``folded``."""
    ranked = sorted(enumerate(reports), key=lambda each: -each[1].verdict.severity)
    tests = [_test(number, report) for number, report in ranked]
    bad = sum(test["kind"] == "bad" for test in tests)
    for test in tests:
        is_open = test["kind"] == "bad" if bad else len(tests) == 1
        test["open"] = is_open and bad <= _OPEN and not folded
    return tests


def _test(number: int, report: GraphReport) -> dict[str, Any]:
    batches, word = report.batches, report.verdict.words
    sessions = [_sessions(report, batch, batch.baseline) for batch in batches if isinstance(batch.baseline, SavedBatch)]
    return {
        "number": number,
        "name": report.name,
        "word": word,
        "words": "|".join(sorted({word, *(batch.word for batch in batches)})),
        "kind": kind_of(word),
        "summary": ", ".join(_summary(report)),
        "judged": [_judged("", each) for each in _told(report.judgements)]
        + [_judged(f", batch {batch.batch_size}", each) for batch in batches for each in _told(batch.judgements)],
        "speedups": drawn(speedup_plot([point for batch in batches if (point := _point(batch))])),
        "latencies": drawn(latency_plot([lane for batch in batches for lane in _lanes(batch)])),
        "sessions": drawn(history_plot(sessions)),
        "facts": [_facts(report, batch, timing) for batch in batches if (timing := batch.valid_timing)],
    }


def _summary(report: GraphReport) -> Iterator[str]:
    if report.batches:
        yield plural(len(report.batches), "batch size")
    if report.compile_mode != "none":
        yield report.compile_mode + (f", compiled in {seconds_text(report.compile_ns)}" if report.compile_ns else "")
    if report.gpu:
        yield report.gpu


def _told(judgements: Iterable[Judgement]) -> list[Judgement]:
    """The judgements that did not pass, the worst first. What was not judged has a section of its own."""
    told = [each for each in judgements if each.verdict not in (Verdict.PASSED, Verdict.NOT_JUDGED)]
    return sorted(told, key=lambda each: -each.verdict.severity)


def _judged(where: str, judgement: Judgement) -> dict[str, Any]:
    verdict = judgement.verdict.words
    return {
        "kind": kind_of(verdict),
        "title": f"{judgement.gate}{where}: {verdict}.",
        "reason": judgement.reason,
        "evidence": judgement.evidence,
        "remedy": judgement.remedy,
    }


def _lanes(batch: BatchReport) -> Iterator[LatencyLane]:
    timing = batch.valid_timing
    arms = {"eager": timing.eager, "compiled": timing.compiled, "replay": timing.replay} if timing else {}
    for arm, each in arms.items():
        if each is not None:
            quantiles = (each.minimum_ns, each.q25_ns, each.median_ns, each.q75_ns, each.q90_ns)
            yield LatencyLane(batch.batch_size, arm, *quantiles)


def _sessions(report: GraphReport, batch: BatchReport, saved: SavedBatch) -> SessionLane:
    """The saved sessions as the machine is now: scaled by the reference workload where the comparison was divided."""
    change, timing = change_since_saved(report, batch), batch.valid_timing
    name = "q25_ns" if change and change.what == "lower quartile" else "median_ns"
    now = getattr(timing.reference, name) if timing and timing.reference and change and change.reference_ns else None
    low, high = change.unchanged_ns if change else (None, None)
    return SessionLane(
        batch_size=batch.batch_size,
        saved=[getattr(each, name) * _scale(now, getattr(each, f"reference_{name}")) for each in saved.sessions],
        today=getattr(timing.replay, name) if timing else None,
        low=low,
        high=high,
    )


def _scale(now_ns: float | None, saved_ns: float | None) -> float:
    return now_ns / saved_ns if now_ns and saved_ns else 1.0


def _facts(report: GraphReport, batch: BatchReport, timing: Timing) -> list[str]:
    receipt, check = batch.receipt, batch.agreement
    kernels, memory = (receipt.kernels, receipt.memory_bytes) if receipt else (None, None)
    exact = ", bit-exact" if check and check.bit_exact else ""
    return [
        str(batch.batch_size),
        _NONE if kernels is None else str(kernels),
        _NONE if memory is None else bytes_text(memory),
        _NONE if receipt is None else seconds_text(receipt.capture_ns),
        _ratio(timing.noise_ratio),
        _ratio(timing.detectable_ratio),
        f"{timing.blocks} (+{timing.discarded} discarded)" if timing.discarded else str(timing.blocks),
        _since_saved(report, batch),
        f"{plural(check.replays, 'replay')}{exact}" if check else _NONE,
    ]


def _ratio(ratio: float) -> str:
    return percent_text(ratio) if math.isfinite(ratio) else _NONE


def _since_saved(report: GraphReport, batch: BatchReport) -> str:
    """Today's value against the middle of the prediction interval."""
    if not isinstance(batch.baseline, SavedBatch):
        return _NONE
    lane = _sessions(report, batch, batch.baseline)
    if lane.today is None or not lane.low or not lane.high:
        return _NONE
    return signed_text(lane.today / math.sqrt(lane.low * lane.high))
