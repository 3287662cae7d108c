"""Time eager against replay, interleaved, until the evidence is in or the budget is out."""

from pytest_cudagraph.measure.arms import Arms, measure, measure_arms
from pytest_cudagraph.measure.timer import Bounds, PerfCounterClock

__all__ = ["Arms", "Bounds", "PerfCounterClock", "measure", "measure_arms"]
