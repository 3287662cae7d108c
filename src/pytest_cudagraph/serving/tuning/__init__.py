"""The tuner: measures a grid of batch sizes, compile modes and graphs, and finds the best cell that is correct."""

from pytest_cudagraph.serving.tuning.cells import ReadyCell, TuningCell
from pytest_cudagraph.serving.tuning.report import MeasuredCell, TuningReport
from pytest_cudagraph.serving.tuning.tuner import tune, tune_examples
