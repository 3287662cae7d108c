"""A model's graphs for serving code: dispatch by batch size, padding, eager where no graph fits, statistics.

::

    graph_runner  GraphRunner: one call after the other, whatever thread it comes from
    calls         what a call asks for, compared with the example
    rows          padding the inputs, cutting the outputs
    graph_set     the graphs there are: captured, evicted, dropped when the model has changed
    watch         whether the model still is the one that was captured
    statistics    what was served, and how
"""

from pytest_cudagraph.runner.graph_runner import GraphRunner
from pytest_cudagraph.runner.statistics import RunnerStatistics

__all__ = ["GraphRunner", "RunnerStatistics"]
