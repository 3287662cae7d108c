"""Everything a model holds between two calls: saved, compared bit by bit, and put back in place."""

from pytest_cudagraph.state.snapshot import Changes, Snapshot, live
from pytest_cudagraph.state.undo import Undo
from pytest_cudagraph.state.walk import modules_of

__all__ = ["Changes", "Snapshot", "Undo", "live", "modules_of"]
