"""Everything a model holds between two calls: saved, compared bit by bit, and put back in place."""

from __future__ import annotations

from pytest_cudagraph.state.snapshot import Changes, Snapshot, live
from pytest_cudagraph.state.walk import modules_of

__all__ = ["Changes", "Snapshot", "live", "modules_of"]
