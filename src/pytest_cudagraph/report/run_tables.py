"""The tables of a run below its results: made once, shown by terminal, GitHub and page, kept in the document."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pytest_cudagraph.report.codec import to_plain
from pytest_cudagraph.report.columns import joined, scenario_tables, text_of
from pytest_cudagraph.report.document import without_secrets
from pytest_cudagraph.report.workloads import Ranks, WorkloadCell, WorkloadTest, cells_of, change, ranks
from pytest_cudagraph.units import factor_text, first_of, latency_text, span_text
from pytest_cudagraph.values import Addition, Agreement, Column, GraphReport, Judgement, Table, Verdict

_BYTES_OF_MIB = 1 << 20

_TITLES = ("workload", "batch", "rank", "by", "latency", "rows/s", "rows/s/MiB", "over eager", "at most")
_WORDS = ("workload", "by", "")
"""Titles of columns with words. The others have numbers."""


def ranking_tables(reports: Iterable[GraphReport], workloads: Iterable[WorkloadTest]) -> list[Table]:
    """One table for each group of workloads. A rank is a range where the measurement does not decide."""
    cells = cells_of(reports, workloads)
    ranked = sorted(zip(cells, ranks(cells), strict=True), key=_order)
    groups = dict.fromkeys(cell.group for cell, _ in ranked)
    return [_ranking(group, [each for each in ranked if each[0].group == group]) for group in groups]


def _ranking(group: str, ranked: Sequence[tuple[WorkloadCell, Ranks | None]]) -> Table:
    judged = any(rank for _, rank in ranked) or not any(cell.session for cell, _ in ranked)
    return _table(
        f"workloads: {group}",
        _TITLES,
        [_row(*each) for each in ranked],
        [cell.reason for cell, _ in ranked],
        "" if judged else "speed is not judged here",
    )


def _table(
    title: str, titles: Sequence[str], rows: Sequence[list[str]], reasons: Sequence[str], note: str = ""
) -> Table:
    """A table without the columns that have nothing to show."""
    used = [index for index in range(len(titles)) if any(row[index] != "-" for row in rows)]
    return Table(
        title=title,
        columns=tuple(Column(title=titles[index], right=titles[index] not in _WORDS) for index in used),
        rows=tuple(tuple(row[index] for index in used) for row in rows),
        remarks=tuple((reason,) if reason else () for reason in reasons),
        note=note,
    )


def _order(ranked: tuple[WorkloadCell, Ranks | None]) -> tuple[Any, ...]:
    cell, _ = ranked
    return cell.group, cell.batch_size is None, cell.batch_size or 0, cell.latency_ns or math.inf


def _row(cell: WorkloadCell, rank: Ranks | None) -> list[str]:
    first, last = rank or (0, 0)
    rows, memory = cell.rows_per_s, cell.memory_bytes
    return [
        cell.workload,
        "-" if cell.batch_size is None else str(cell.batch_size),
        "-" if rank is None else str(first) if first == last else f"{first}-{last}",
        cell.way,
        "-" if cell.latency_ns is None else latency_text(cell.latency_ns),
        _rate_text(rows),
        _rate_text(rows / memory * _BYTES_OF_MIB if rows and memory else None),
        _over_eager(cell),
        "-" if cell.attainable_ratio is None else factor_text(cell.attainable_ratio),
    ]


def _rate_text(rate: float | None) -> str:
    """``1,339``, or three digits of a small number."""
    if rate is None:
        return "-"
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _over_eager(cell: WorkloadCell) -> str:
    if cell.over_eager_ratio is None:
        return "-"
    bounds = f" ({cell.speedup.low:.2f}-{cell.speedup.high:.2f})" if cell.speedup else ""
    return factor_text(cell.over_eager_ratio) + bounds


_CHANGE_TITLES = ("workload", "batch", "by", "before", "after", "change", "")


def changes(old: Sequence[WorkloadCell], new: Sequence[WorkloadCell]) -> list[str]:
    """What moved from one run to another beyond the intervals, and how many cells did not."""
    before, after = ({cell.key: cell for cell in cells} for cells in (old, new))
    pairs = [(before.get(key), after.get(key)) for key in dict.fromkeys([*before, *after])]
    moved = [(one, other, word) for one, other in pairs if (word := _moved(one, other))]
    within = sum(change(*pair) is not None and not _moved(*pair) for pair in pairs)
    others = len(pairs) - len(moved) - within
    counted = f"{len(moved)} moved, {within} within the intervals" + f", {others} not compared" * bool(others)
    if not moved:
        return [counted]
    whole = {(cell.group, cell.workload): cell for cell in after.values() if not cell.session}
    why = [other or (whole.get((one.group, one.workload)) if one else None) for one, other, _ in moved]
    rows, reasons = [_change_row(*each) for each in moved], [cell.reason if cell else "" for cell in why]
    return [*text_of(_table("", _CHANGE_TITLES, rows, reasons))[1:], counted]


def _moved(one: WorkloadCell | None, other: WorkloadCell | None) -> str:
    """Empty for a cell that did not move."""
    had, has = (each is not None and each.session is not None for each in (one, other))
    if had != has:
        return "new" if has else "gone"
    moved = change(one, other)
    if moved is None or moved.low_log <= 0.0 <= moved.high_log:
        return ""
    return "faster" if moved.high_log < 0.0 else "slower"


def _change_row(one: WorkloadCell | None, other: WorkloadCell | None, word: str) -> list[str]:
    cell = next(each for each in (other, one) if each is not None)
    moved = change(one, other)
    before, after = (each.latency_ns if each else None for each in (one, other))
    return [
        f"{cell.group}: {cell.workload}",
        "-" if cell.batch_size is None else str(cell.batch_size),
        cell.way,
        "-" if before is None else latency_text(before),
        "-" if after is None else latency_text(after),
        "-" if moved is None else span_text(math.exp(moved.low_log), math.exp(moved.high_log)),
        word,
    ]


NAMED = 5
"""Tests that a finding or a reason names. The rest is counted."""


def run_tables(
    reports: Sequence[GraphReport],
    judged: Iterable[Table] = (),
    additions: Iterable[Addition] = (),
    workloads: Iterable[WorkloadTest] = (),
    settings: Any = None,
) -> list[Table]:
    """All tables that have rows. ``judged`` are those of further gates."""
    added = [table for addition in additions for table in addition.tables]
    tables = [_not_judged(reports), _notes(reports), *judged, *scenario_tables(reports), *joined(added),
              *ranking_tables(reports, workloads), _settings(settings)]  # fmt: skip
    return [table for table in tables if table.rows]


def _page_table(title: str, titles: str, rows: Iterable[Sequence[str]], *, folded: bool = False) -> Table:
    """A table of words, for the page. The terminal has lines of its own for it."""
    columns = tuple(Column(title=each, right=each == "count") for each in titles.split("|"))
    return Table(title=title, columns=columns, rows=tuple(map(tuple, rows)), folded=folded, in_terminal=False)


def named(names: Iterable[str]) -> str:
    """A test per line, and how many there are beside them."""
    return first_of(list(dict.fromkeys(names)), NAMED, "\n")


def _not_judged(reports: Iterable[GraphReport]) -> Table:
    where: dict[str, list[str]] = {}
    for report in reports:
        for name, judgements, agreement in _parts(report):
            told = [each.reason for each in judgements if each.verdict is Verdict.NOT_JUDGED]
            told += [f"not compared: {what}" for what in agreement.not_compared] if agreement else []
            for what in told:
                where.setdefault(what, []).append(name)
        for what in report.not_judged:
            where.setdefault(what, []).append(report.name)
    rows = [(what, str(len(names)), named(names)) for what, names in where.items()]
    return _page_table("not judged", "what and why|count|where", rows)


def _notes(reports: Iterable[GraphReport]) -> Table:
    where: dict[tuple[str, str], list[str]] = {}
    for report in reports:
        for name, _, agreement in _parts(report):
            told = [("warning", text) for text in agreement.warnings] if agreement else []
            told += [("note", text) for text in agreement.notes] if agreement else []
            for key in told:
                where.setdefault(key, []).append(name)
        for text in report.notes:
            where.setdefault(("note", text), []).append(report.name)
    ordered = sorted(where.items(), key=lambda each: each[0][0] != "warning")
    return _page_table("warnings and notes", "kind|text|where", [(*key, named(names)) for key, names in ordered])


def _parts(report: GraphReport) -> Iterator[tuple[str, Sequence[Judgement], Agreement | None]]:
    """The model as a whole, and each batch size, by name."""
    yield report.name, report.judgements, None
    for batch in report.batches:
        yield f"{report.name}, batch {batch.batch_size}", batch.judgements, batch.agreement


def _settings(settings: Any) -> Table:
    plain = to_plain(without_secrets(settings or {}), public=True)
    texts = {name: ", ".join(map(str, value)) if isinstance(value, list) else value for name, value in plain.items()}
    rows = [(name, "off" if text in (None, False) else str(text)) for name, text in texts.items()]
    return _page_table("settings", "setting|value", rows, folded=True)
