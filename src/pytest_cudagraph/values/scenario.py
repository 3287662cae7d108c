"""What a feature gives to a run: tables, additions, and the result of a scenario."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """What one test adds to its run. The results of a test that runs again replace it."""

    nodeid: str
    key: str
    """The list of the document that has the entry, such as ``calls``."""
    entry: Mapping[str, Any]
    """Plain values. The document adds the node id."""
    lines: tuple[str, ...] = ()
    """What the summary of the terminal says."""
    tables: tuple[Table, ...] = ()
    """Joined with those of other tests by title and columns."""


class Scenario(Protocol):
    """A frozen result of one scenario at one batch size.

    The core knows no more of a feature than this. ``BatchReport.judgements`` has its judgements.
    """

    @property
    def kind(self) -> str:
        """One word that names the scenario in documents, such as ``prefill``."""

    @property
    def has_entry(self) -> bool:
        """Whether a graph was timed whose latency a baseline keeps."""

    def tables(self, test: str) -> tuple[Table, ...]:
        """Its rows. The first column has no title, and the name of the test in it."""

    def document(self) -> Mapping[str, Any]:
        """Its part of the JSON document: plain values, times in seconds."""

    def properties(self) -> Mapping[str, str]:
        """JUnit's properties, by the key below the batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredScenario:
    """A scenario read from a document, where the feature that made it is not needed."""

    kind: str
    has_entry: bool
    stored_tables: tuple[Table, ...]
    stored_document: Mapping[str, Any]
    stored_properties: Mapping[str, str]

    def tables(self, test: str) -> tuple[Table, ...]:
        """The tables as they were written."""
        return self.stored_tables

    def document(self) -> Mapping[str, Any]:
        """The document as it was written."""
        return self.stored_document

    def properties(self) -> Mapping[str, str]:
        """The properties as they were written."""
        return self.stored_properties


def stored(scenario: Scenario, test: str) -> StoredScenario:
    """A scenario as plain facts, for the document and for the way from an xdist worker to the controller."""
    return StoredScenario(
        kind=scenario.kind,
        has_entry=scenario.has_entry,
        stored_tables=scenario.tables(test),
        stored_document=scenario.document(),
        stored_properties=scenario.properties(),
    )
