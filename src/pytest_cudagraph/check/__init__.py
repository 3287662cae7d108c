"""The check stage: replay every graph on new inputs and compare outputs and state with eager."""

from pytest_cudagraph.check.replay_check import check_replays

__all__ = ["check_replays"]
