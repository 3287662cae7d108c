"""Times eager and replay in turn, until the stopping rule decides or the time budget ends."""

from pytest_cudagraph.measure.arms import Arms, measure_arms
from pytest_cudagraph.measure.sampling import LEAST_CPU_SHARE
from pytest_cudagraph.measure.timer import Bounds, PerfCounterClock
