"""The check stage: a replay must compute what eager computes."""

from pytest_cudagraph.check.replay_check import check_replays, reset_difference
