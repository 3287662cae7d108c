"""The tuner: measures a grid of batch sizes, compile modes and graphs, and finds the best combination that is
correct."""

from pytest_cudagraph.serving.tuning.grid import Combination, ReadyCombination
from pytest_cudagraph.serving.tuning.report import MeasuredCombination, TuningReport
from pytest_cudagraph.serving.tuning.tuner import tune, tune_examples
