"""Does replay compute what eager computes: outputs and state, on new inputs, in shuffled order."""

from pytest_cudagraph.check.replay_check import check_replays

__all__ = ["check_replays"]
