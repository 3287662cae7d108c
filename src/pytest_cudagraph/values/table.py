"""A table of a run: made once, shown by the terminal, the GitHub summary and the page, kept in the document."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column's title, and whether its cells are aligned right (numbers) or left (words)."""

    title: str
    right: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Text in columns under a title. Tables of one title and the same columns are joined to one table of a run.

    The title begins with a small letter: the terminal writes it above the names of tests.
    """

    title: str
    columns: tuple[Column, ...]
    """A first column without a title has the names of tests."""
    rows: tuple[tuple[str, ...], ...]
    """One text per column in each row."""
    remarks: tuple[tuple[str, ...], ...] = ()
    """Lines below each row, such as the reason of a verdict. Empty, or one tuple per row."""
    note: str = ""
    """A sentence beside the title. It says what the columns mean."""
    folded: bool = False
    """Whether a page shows it closed at first."""
    in_terminal: bool = True
    """Whether the terminal shows it. The page shows every table."""

    def __post_init__(self) -> None:
        if not self.columns or any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"the table {self.title!r} needs one text per column in each row")
        if self.remarks and len(self.remarks) != len(self.rows):
            raise ValueError(f"the table {self.title!r} needs remarks for each row, or none")
