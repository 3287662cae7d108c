"""What a feature adds to a run beside the reports: an entry of the JSON document, and lines of the summary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytest_cudagraph.values.table import Table


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
