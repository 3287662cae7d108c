"""A generation: which steps replayed a graph, whether its tokens are eager's, and how fast it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationReceipt:
    """How the decode steps of one generation ran. A step makes one token of every row."""

    steps: int
    replays: int
    """Launches of graphs, counted by the graphs themselves."""
    padded_rows: int = 0
    """Rows that every step computed beyond the batch, because the graph is larger."""
    eager: Mapping[str, int] = field(default_factory=dict)
    """Steps without a graph, by reason."""
