"""The results of a run: a table per device for people, properties for JUnit."""

from __future__ import annotations

import math
import posixpath
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from pytest_cudagraph.baseline import normal_name
from pytest_cudagraph.foreign import printable
from pytest_cudagraph.report.columns import MAX_WIDTH, Column, fits, grid, scenario_tables, text_of, wrapped
from pytest_cudagraph.units import factor_text, latency_text, plural, to_seconds
from pytest_cudagraph.values import (
    BatchReport,
    DeviceInfo,
    GraphReport,
    Interval,
    ReportColumn,
    SavedBatch,
    Verdict,
    is_emulated,
)


def device_text(device: DeviceInfo) -> str:
    """``NVIDIA H200, driver 580.159, torch 2.11.0``, or ``cpu: AMD EPYC 9B45, torch 2.13.0``."""
    if is_emulated(device.name):
        return f"{device.name}, no GPU, torch {device.torch}"
    name = f"cpu: {device.name}" if device.kind == "cpu" else device.name
    driver = f", driver {device.driver}" if device.driver else ""
    return f"{name}{driver}, torch {device.torch}"


def header(device: DeviceInfo, *, baseline: str, min_speedup: float, judged: bool) -> str:
    """The line above the tests. ``judged`` is false in a rehearsal: speed is shown and not judged."""
    gate = f"gate {factor_text(min_speedup)}" if judged else "rehearsal: speed is not judged"
    threads = f", {plural(device.threads, 'thread')}" if device.kind == "cpu" else ""
    return f"cudagraph: {device_text(device)}{threads}; baseline {baseline}; {gate}"


UNTIMED = (Verdict.WRONG, Verdict.NOT_CAPTURED)
"""Verdicts without timings: a wrong or missing graph is not the model."""

_MIN_TEST = 20
"""With less width for a test's name, the intervals are left out."""


_MOST_ROWS = 40
"""A longer table has only the rows that failed, are inconclusive or have a note."""

_FINE = ("passed", "not judged", "no baseline yet")

_SLOWER_RATIO = 0.95
"""Below it a replay is called slower than the compiled code. The figure has no interval, and noise is no finding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table. Times in nanoseconds, None if there is nothing to show."""

    test: str
    batch_size: int | None
    word: str
    eager_ns: float | None = None
    compiled_ns: float | None = None
    replay_ns: float | None = None
    speedup: Interval | None = None
    min_speedup: float | None = None
    note: str = ""
    """Shown on a line below: why there are no timings, or how the graph changed."""
    added: tuple[str, ...] = ()
    """The cells of other plugins' columns."""


def table(reports: Iterable[GraphReport], added: Sequence[ReportColumn] = ()) -> list[str]:
    """The table of a run: one block per device, under a line that names the device. ``added`` are further columns."""
    lines: list[str] = []
    for device, own in by_device(reports).items():
        rows = [row for report in own for row in rows_of(report, added)]
        short = without_common_folder(rows)
        shown = {row.test: other.test for row, other in zip(rows, short, strict=True)}
        lines += [device, *_rendered(short, added)]
        lines += [line for each in scenario_tables(own) if each.in_terminal for line in text_of(each, shown)]
    return lines


def _rendered(rows: Sequence[Row], added: Sequence[ReportColumn]) -> list[str]:
    """All rows, or of many only those that somebody has to look at."""
    if len(rows) <= _MOST_ROWS:
        return render(rows, added)
    shown = [row for row in rows if row.note or row.word not in _FINE]
    hidden = len(rows) - len(shown)
    rest = f"{plural(hidden, 'row')} without a failure not shown; --cudagraph-html=PATH writes a page with all"
    return [*(render(shown, added) if shown else ()), *([rest] if hidden else ())]


def by_device(reports: Iterable[GraphReport]) -> dict[str, list[GraphReport]]:
    """The reports of each device, by its description."""
    groups: dict[str, list[GraphReport]] = {}
    for report in reports:
        groups.setdefault(device_text(report.device) if report.device else "no device", []).append(report)
    return groups


def without_common_folder(rows: Sequence[Row]) -> list[Row]:
    """The same rows without a folder that is common to all tests."""
    names = {row.test for row in rows}
    if not names or any("::" not in name for name in names):
        return list(rows)
    folder = posixpath.commonpath([posixpath.dirname(name.partition("::")[0]) or "." for name in names])
    return [replace(row, test=row.test.removeprefix(f"{folder}/")) for row in rows]


def rows_of(report: GraphReport, added: Sequence[ReportColumn] = ()) -> list[Row]:
    """The rows of one report. A model that reached no batch size has one."""
    if report.batches:
        return [_row(report, batch, added) for batch in report.batches]
    worst = next((judgement for judgement in report.judgements if judgement.verdict is report.verdict), None)
    word = report.verdict.words
    note, cells = worst.reason if worst else "", ("-",) * len(added)
    return [Row(test=report.name, batch_size=None, word=word, note=note, added=cells)]


def _row(report: GraphReport, batch: BatchReport, added: Sequence[ReportColumn]) -> Row:
    timing = batch.valid_timing
    return Row(
        test=report.name,
        batch_size=batch.batch_size,
        word=batch.word,
        eager_ns=timing.medians.eager_ns if timing else None,
        compiled_ns=timing.medians.compiled_ns if timing else None,
        replay_ns=timing.medians.replay_ns if timing else None,
        speedup=timing.speedup if timing else batch.speedup,
        min_speedup=batch.min_speedup,
        note=_note(batch),
        added=tuple(column.cell(report, batch) for column in added),
    )


def _note(batch: BatchReport) -> str:
    if batch.verdict in UNTIMED:
        return batch.worst.reason if batch.worst else ""
    saved, now = batch.baseline, batch.receipt
    if not isinstance(saved, SavedBatch) or now is None or saved.kernels == now.kernels:
        return ""
    structure = batch.judged_by("structure")
    return structure.reason if structure else ""


def render(rows: Sequence[Row], added: Sequence[ReportColumn] = ()) -> list[str]:
    """A title line, one line per row, and below each row its note."""
    compiled = any(row.compiled_ns is not None for row in rows)
    *columns, verdict = columns_of(compiled)
    columns += [*(Column(title=each.title, right=each.right) for each in added), verdict]
    shown = _named_once(rows)
    cells = [cells_of(row, compiled=compiled, interval=True) for row in shown]
    if not fits(columns, cells, first=_MIN_TEST):
        cells = [cells_of(row, compiled=compiled, interval=False) for row in shown]
    title, *lines = grid(columns, cells)
    return [title, *_with_notes(rows, lines)]


def columns_of(compiled: bool) -> list[Column]:
    """The titles of the table."""
    numbers = ["batch", "eager", *(["compiled"] if compiled else []), "replay"]
    numbers += [*(["graph"] if compiled else []), "speedup", "target"]
    return [Column(title=title, right=title in numbers) for title in ("test", *numbers, "verdict")]


def cells_of(row: Row, *, compiled: bool, interval: bool) -> list[str]:
    """The texts of a row, one for each column."""
    return [
        row.test,
        "-" if row.batch_size is None else str(row.batch_size),
        _latency(row.eager_ns),
        *([_latency(row.compiled_ns)] if compiled else []),
        _latency(row.replay_ns),
        *([_graph_share(row)] if compiled else []),
        _speedup(row.speedup, interval=interval),
        "-" if row.min_speedup is None else factor_text(row.min_speedup),
        *row.added,
        row.word,
    ]


def _graph_share(row: Row) -> str:
    """The part of the speedup that is the graph's own: compiled code over replay."""
    return "-" if row.compiled_ns is None or not row.replay_ns else factor_text(row.compiled_ns / row.replay_ns)


def _slower_than_compiled(row: Row) -> str:
    if row.compiled_ns is None or not row.replay_ns or row.compiled_ns > _SLOWER_RATIO * row.replay_ns:
        return ""
    return f"the replay is slower than the compiled code: {_graph_share(row)}, so the speedup is the compiler's alone"


def _latency(nanoseconds: float | None) -> str:
    return "-" if nanoseconds is None else latency_text(nanoseconds)


def _speedup(speedup: Interval | None, *, interval: bool) -> str:
    if speedup is None:
        return "-"
    # With too few blocks there are not two bounds, and the column has no room for an explanation.
    bounds = f" ({speedup.low:.2f}-{speedup.high:.2f})" if interval and math.isfinite(speedup.high) else ""
    return factor_text(speedup.estimate) + bounds


def _named_once(rows: Sequence[Row]) -> list[Row]:
    """The same rows, a test's name only on its first."""
    named: list[Row] = []
    last = None
    for row in rows:
        named.append(row if row.test != last else replace(row, test=""))
        last = row.test
    return named


def _with_notes(rows: Sequence[Row], lines: Sequence[str]) -> list[str]:
    shown: list[str] = []
    for row, line in zip(rows, lines, strict=True):
        shown += [line, *(part for note in notes_of(row) for part in wrapped(note, MAX_WIDTH, indent="  "))]
    return shown


def notes_of(row: Row) -> list[str]:
    """What is shown below a row."""
    return [note for note in (row.note, _slower_than_compiled(row)) if note]


def properties(report: GraphReport) -> list[tuple[str, str]]:
    """JUnit's properties of a test: ``cudagraph.batch_8.speedup`` = ``1.42``. A custom name is part of the key."""
    is_plain = report.name == normal_name(report.nodeid)
    prefix = "cudagraph" if is_plain else f"cudagraph.{printable(report.name)}"
    pairs = [(f"{prefix}.verdict", report.verdict.value)]
    for batch in report.batches:
        pairs += [(f"{prefix}.batch_{batch.batch_size}.{key}", text) for key, text in _properties(batch)]
    return pairs


def _properties(batch: BatchReport) -> Iterator[tuple[str, str]]:
    yield "verdict", batch.verdict.value
    timing = batch.valid_timing
    if timing is not None:
        for end, suffix in (("estimate", ""), ("low", "_low"), ("high", "_high")):
            yield f"speedup{suffix}", f"{getattr(timing.speedup, end):.2f}"
        yield "eager_seconds", f"{to_seconds(timing.medians.eager_ns):.4g}"
        yield "replay_seconds", f"{to_seconds(timing.medians.replay_ns):.4g}"
    if batch.scenario is not None:
        yield from batch.scenario.properties().items()
    if batch.receipt is not None and batch.receipt.kernels is not None:
        yield "kernels", str(batch.receipt.kernels)
