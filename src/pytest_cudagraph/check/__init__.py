"""The check stage: a replay must compute what eager computes."""

from pytest_cudagraph.check.compare import Tolerance
from pytest_cudagraph.check.later_calls import lasting_difference
from pytest_cudagraph.check.replay_check import check_replays, reset_difference
