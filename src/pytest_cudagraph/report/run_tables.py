"""The tables of a run below its results: made once, shown by terminal, GitHub and page, kept in the document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pytest_cudagraph.report.codec import to_plain
from pytest_cudagraph.report.columns import joined, scenario_tables
from pytest_cudagraph.report.document import without_secrets
from pytest_cudagraph.report.rankings import ranking_tables
from pytest_cudagraph.report.workloads import WorkloadTest
from pytest_cudagraph.values import Addition, Agreement, Column, GraphReport, Judgement, Table, Verdict

NAMED = 5
"""Tests that a finding or a reason names. The rest is counted."""


def run_tables(
    reports: Sequence[GraphReport],
    base: Iterable[Table] = (),
    additions: Iterable[Addition] = (),
    workloads: Iterable[WorkloadTest] = (),
    settings: Any = None,
) -> list[Table]:
    """All tables that have rows. ``base`` are those of ``--cudagraph-base``."""
    added = [table for addition in additions for table in addition.tables]
    tables = [_not_judged(reports), _notes(reports), *base, *scenario_tables(reports), *joined(added),
              *ranking_tables(reports, workloads), _settings(settings)]  # fmt: skip
    return [table for table in tables if table.rows]


def _page_table(title: str, titles: str, rows: Iterable[Sequence[str]], *, folded: bool = False) -> Table:
    """A table of words, for the page. The terminal has lines of its own for it."""
    columns = tuple(Column(title=each, right=each == "count") for each in titles.split("|"))
    return Table(title=title, columns=columns, rows=tuple(map(tuple, rows)), folded=folded, in_terminal=False)


def named(names: Iterable[str]) -> str:
    """A test per line, and how many there are beside them."""
    names = list(dict.fromkeys(names))
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return "\n".join(names[:NAMED]) + more


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
    found = sorted(where.items(), key=lambda each: each[0][0] != "warning")
    return _page_table("warnings and notes", "kind|text|where", [(*key, named(names)) for key, names in found])


def _parts(report: GraphReport) -> Iterator[tuple[str, Sequence[Judgement], Agreement | None]]:
    """The model as a whole, and each batch size, by name."""
    yield report.name, report.judgements, None
    for batch in report.batches:
        yield f"{report.name}, batch {batch.batch_size}", batch.judgements, batch.agreement


def _settings(settings: Any) -> Table:
    plain = to_plain(without_secrets(settings or {}), public=True)
    rows = [(name, _setting(value)) for name, value in plain.items()]
    return _page_table("settings", "setting|value", rows, folded=True)


def _setting(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else "off" if value in (None, False) else str(value)
