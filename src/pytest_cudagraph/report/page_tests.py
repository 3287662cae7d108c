"""What the HTML page shows of each test: the rows of the table, its plots, its judgements, its measurement."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_cudagraph.report.plots import (
    LatencyLane,
    SessionLane,
    SpeedupPoint,
    history_plot,
    latency_plot,
    speedup_plot,
    speedup_scale,
)
from pytest_cudagraph.report.rendering import drawn
from pytest_cudagraph.report.table import Row, cells_of, columns_of, notes_of
from pytest_cudagraph.units import (
    bytes_text,
    factor_text,
    percent_text,
    plural,
    seconds_text,
    signed_text,
    to_ns,
)
from pytest_cudagraph.values import Verdict

if TYPE_CHECKING:
    from markupsafe import Markup

_OPEN = 20
"""Failing tests that are unfolded. With more of them a page is read by its table."""

# "missing" is a word of earlier versions.
_KINDS = {"missing": "none", "passed": "ok", "inconclusive": "warn", "not judged": "none", "no baseline yet": "none"}

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


def page_rows(found: Mapping[str, Any], rows: Sequence[Row]) -> list[PageRow]:
    """The table. ``rows`` are those of the document, in its order."""
    places = [(at, batch) for at, test in enumerate(found["tests"]) for batch in test["batches"] or [{}]]
    points = [_point(batch) for _, batch in places]
    mark = speedup_scale(point for point in points if point)
    shown, last = [], -1
    for (number, batch), point, row in zip(places, points, rows, strict=True):
        shown.append(_row(number, row, batch, drawn(mark(point)) if point else "", again=number == last))
        last = number
    return shown


def _row(number: int, row: Row, batch: Mapping[str, Any], mark: Markup | str, *, again: bool) -> PageRow:
    cells = dict(
        zip((each.title for each in columns_of(True)), cells_of(row, compiled=True, interval=True), strict=True)
    )
    file, separator, test = row.test.partition("::")
    limit = batch.get("attainable_speedup")
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


def _point(batch: Mapping[str, Any]) -> SpeedupPoint | None:
    speedup = batch.get("speedup")
    if not speedup or not speedup["estimate"]:
        return None
    return SpeedupPoint(
        batch_size=int(batch["batch_size"]),
        estimate=float(speedup["estimate"]),
        low=float(speedup["low"] or 0.0),
        high=math.inf if speedup["high"] is None else float(speedup["high"]),
        target=_number(batch["min_speedup"]),
        attainable=_number(batch.get("attainable_speedup")),
    )


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def page_tests(found: Mapping[str, Any], *, folded: bool) -> list[dict[str, Any]]:
    """Each test with its details, the worst first. Failing tests are unfolded unless the page is ``folded``."""
    severity = {each.value: each.severity for each in Verdict}
    ranked = sorted(enumerate(found["tests"]), key=lambda each: -severity.get(each[1]["verdict"], 0))
    tests = [_test(number, test) for number, test in ranked]
    bad = sum(test["kind"] == "bad" for test in tests)
    for test in tests:
        is_open = test["kind"] == "bad" if bad else len(tests) == 1
        test["open"] = is_open and bad <= _OPEN and not folded
    return tests


def _test(number: int, test: Mapping[str, Any]) -> dict[str, Any]:
    batches, word = test["batches"], test["verdict"].replace("-", " ")
    return {
        "number": number,
        "name": test["name"],
        "word": word,
        "words": "|".join(sorted({word, *(str(batch.get("word", "")) for batch in batches)})),
        "kind": kind_of(word),
        "summary": ", ".join(_summary(test)),
        "judged": [_judged("", each) for each in _told(test)]
        + [_judged(f", batch {batch['batch_size']}", each) for batch in batches for each in _told(batch)],
        "speedups": drawn(speedup_plot([point for batch in batches if (point := _point(batch))])),
        "latencies": drawn(latency_plot([lane for batch in batches for lane in _lanes(batch)])),
        "sessions": drawn(history_plot([_sessions(batch) for batch in batches if batch.get("baseline")])),
        "facts": [_facts(batch) for batch in batches if batch.get("replay")],
    }


def _summary(test: Mapping[str, Any]) -> Iterator[str]:
    if test["batches"]:
        yield plural(len(test["batches"]), "batch size")
    if test.get("compile_mode", "none") != "none":
        seconds = test.get("compile_seconds")
        yield test["compile_mode"] + (f", compiled in {seconds_text(to_ns(seconds))}" if seconds else "")
    if test.get("gpu"):
        yield test["gpu"]


def _told(judged: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The judgements that did not pass, the worst first. What was not judged has a section of its own."""
    told = [each for each in judged.get("judgements", ()) if each["verdict"] not in ("passed", "not-judged")]
    order = [each.value for each in Verdict]
    return sorted(told, key=lambda each: -order.index(each["verdict"]) if each["verdict"] in order else 0)


def _judged(where: str, judgement: Mapping[str, Any]) -> dict[str, Any]:
    verdict = judgement["verdict"].replace("-", " ")
    return {
        "kind": kind_of(verdict),
        "title": f"{judgement['gate']}{where}: {verdict}.",
        "reason": judgement["reason"],
        "evidence": judgement["evidence"],
        "remedy": judgement["remedy"],
    }


def _lanes(batch: Mapping[str, Any]) -> Iterator[LatencyLane]:
    for arm in ("eager", "compiled", "replay"):
        latency = batch.get(arm)
        # Documents of earlier versions have fewer quantiles.
        if latency and latency.get("minimum"):
            quantiles = (to_ns(float(latency[key])) for key in ("minimum", "q25", "median", "q75", "q90"))
            yield LatencyLane(int(batch["batch_size"]), arm, *quantiles)


def _sessions(batch: Mapping[str, Any]) -> SessionLane:
    """The saved sessions as the machine is now: scaled by the reference workload where the comparison was divided."""
    saved, unchanged = batch["baseline"], batch["baseline"].get("unchanged") or {}
    key = "q25" if unchanged.get("statistic") == "lower quartile" else "median"
    reference = batch.get("reference") if unchanged.get("divided") else None
    scale = _scale_by(float(reference[key]), f"reference_{key}") if reference else (lambda _: 1.0)
    return SessionLane(
        batch_size=int(batch["batch_size"]),
        saved=[to_ns(float(each[key])) * scale(each) for each in saved.get("sessions", ())],
        today=to_ns(float(batch["replay"][key])) if batch.get("replay") else None,
        low=to_ns(float(unchanged["low"])) if unchanged else None,
        high=to_ns(float(unchanged["high"])) if unchanged else None,
    )


def _scale_by(now_s: float, key: str) -> Callable[[Mapping[str, Any]], float]:
    return lambda session: now_s / float(session[key]) if session.get(key) else 1.0


def _facts(batch: Mapping[str, Any]) -> list[str]:
    memory, capture, detectable = (batch.get(key) for key in ("memory_bytes", "capture_seconds", "detectable_ratio"))
    noise, discarded = batch.get("noise_ratio"), batch.get("discarded")
    return [
        str(batch["batch_size"]),
        _NONE if batch["kernels"] is None else str(batch["kernels"]),
        _NONE if memory is None else bytes_text(memory),
        _NONE if capture is None else seconds_text(to_ns(capture)),
        _NONE if noise is None else percent_text(noise),
        _NONE if detectable is None else percent_text(detectable),
        f"{batch['blocks']} (+{discarded} discarded)" if discarded else str(batch["blocks"]),
        _since_saved(batch),
        _check_text(batch.get("check")),
    ]


def _since_saved(batch: Mapping[str, Any]) -> str:
    """Today's value against the middle of the prediction interval."""
    if not batch.get("baseline") or not batch["baseline"].get("unchanged"):
        return _NONE
    lane = _sessions(batch)
    if lane.today is None or not lane.low or not lane.high:
        return _NONE
    return signed_text(lane.today / math.sqrt(lane.low * lane.high))


def _check_text(check: Mapping[str, Any] | None) -> str:
    if not check:
        return _NONE
    return f"{plural(check['replays'], 'replay')}{', bit-exact' if check['bit_exact'] else ''}"
