"""The tables of a run below that of its results: those of scenarios, joined."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pytest_cudagraph.values import Column, GraphReport, Table


def tables(reports: Iterable[GraphReport]) -> list[Table]:
    """The tables of all scenarios. Those of one title and the same columns are one."""
    joined: dict[tuple[str, tuple[Column, ...]], Table] = {}
    for report in reports:
        for scenario in (batch.scenario for batch in report.batches if batch.scenario is not None):
            for table in scenario.tables(report.name):
                first = joined.get((table.title, table.columns))
                joined[table.title, table.columns] = table if first is None else _joined(first, table)
    return [table for table in joined.values() if table.rows]


def _joined(first: Table, second: Table) -> Table:
    remarks = _remarks(first) + _remarks(second)
    return replace(first, rows=first.rows + second.rows, remarks=remarks if any(remarks) else ())


def _remarks(table: Table) -> tuple[tuple[str, ...], ...]:
    return table.remarks or ((),) * len(table.rows)
