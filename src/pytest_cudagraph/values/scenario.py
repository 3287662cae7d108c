"""What a feature measures beside the graph of a model: one result, which the core judges, shows, saves and sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pytest_cudagraph.values.table import Table


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
