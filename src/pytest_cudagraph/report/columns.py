"""Tables as text in columns, and tables of one kind joined."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from pytest_cudagraph.foreign import printable
from pytest_cudagraph.values import Column, GraphReport, Table

MAX_WIDTH = 100
"""Wider tables wrap in code reviews, in CI logs and on a split screen."""

_GAP = "  "

_MIN_NAME = 12
"""A shorter name is not useful. The line then exceeds the width."""


_NO_NAMES: Mapping[str, str] = MappingProxyType({})


def text_of(table: Table, short_names: Mapping[str, str] = _NO_NAMES) -> list[str]:
    """A table as lines: title and note, the columns, each row with its remarks below.

    A first column without a title has the table's own, and no line is above it. Names of tests in it are shown as in
    ``short_names``.
    """
    columns, rows, above = table.columns, table.rows, ["; ".join(filter(None, (table.title, table.note)))]
    if not columns[0].title:
        columns, above = (replace(columns[0], title=table.title), *columns[1:]), []
        rows = tuple((short_names.get(row[0], row[0]), *row[1:]) for row in rows)
    titles, *lines = grid(columns, rows)
    below = table.remarks or ((),) * len(lines)
    shown = [*above, titles]
    for line, remarks in zip(lines, below, strict=True):
        shown += [line, *(part for remark in remarks for part in wrapped(remark, MAX_WIDTH, indent="  "))]
    return shown


def grid(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[str]:
    """A title line and one line per row, at most 100 columns wide: the first column is shortened."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = _widths(columns, rows)
    widths[0] = min(widths[0], max(_MIN_NAME, _room(widths)))
    return [_line(columns, row, widths) for row in [[column.title for column in columns], *rows]]


def fits(columns: Sequence[Column], rows: Sequence[Sequence[str]], *, first: int) -> bool:
    """Whether the first column keeps ``first`` columns, or all that its cells need, beside the others."""
    widths = _widths(columns, rows)
    return _room(widths) >= min(first, widths[0])


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[int]:
    return [max([len(column.title), *(len(row[index]) for row in rows)]) for index, column in enumerate(columns)]


def _room(widths: Sequence[int]) -> int:
    return MAX_WIDTH - sum(widths[1:]) - len(_GAP) * (len(widths) - 1)


def shorten(text: str, width: int) -> str:
    """``tests/mod…test_decoder[fp16]``: both ends of a name, with more of the end, which names the test."""
    if len(text) <= width:
        return text
    head = (width - 1) // 3
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def _line(columns: Sequence[Column], row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [shorten(row[0], widths[0]), *row[1:]]
    padded = [
        cell.rjust(width) if column.right else cell.ljust(width)
        for column, cell, width in zip(columns, cells, widths, strict=True)
    ]
    return _GAP.join(padded).rstrip()


def wrapped(text: str, width: int, *, indent: str = "", names: bool = False) -> list[str]:
    """Lines of at most ``width`` columns. With ``names`` a longer node id is not split."""
    return textwrap.wrap(
        printable(text),
        width=width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_on_hyphens=False,
        break_long_words=not names,
    )


def scenario_tables(reports: Iterable[GraphReport]) -> list[Table]:
    """The tables of all scenarios."""
    scenarios = [(report.name, batch.scenario) for report in reports for batch in report.batches]
    return joined(table for name, scenario in scenarios if scenario is not None for table in scenario.tables(name))


def joined(tables: Iterable[Table]) -> list[Table]:
    """Tables of one title and the same columns are one."""
    first: dict[tuple[str, tuple[Column, ...]], Table] = {}
    for table in tables:
        key = (table.title, table.columns)
        first[key] = _joined(first[key], table) if key in first else table
    return [table for table in first.values() if table.rows]


def _joined(first: Table, second: Table) -> Table:
    remarks = _remarks(first) + _remarks(second)
    return replace(first, rows=first.rows + second.rows, remarks=remarks if any(remarks) else ())


def _remarks(table: Table) -> tuple[tuple[str, ...], ...]:
    return table.remarks or ((),) * len(table.rows)
