"""The drop-in for pipelines that compile a model ahead of time and then use what they get in its place.

::

    compiler     IntegratedAOTCompiler: several models, found again by identity
    request      what a pipeline asked for: mode, settings, example inputs
    serving      one model on its optimised path: graph, else compiled code, else eager, and why
    code         compiled code, and whether it still is that of the model
    proof        nothing serves a call before it has given eager's answers
    handle       what a pipeline uses in place of its model
    sharing      a model's contents without the model, so that nobody keeps it alive
    statistics   what was served, and how
"""

from pytest_cudagraph.integrated.compiler import IntegratedAOTCompiler, create_integrated_compiler
from pytest_cudagraph.integrated.handle import OptimizedModel
from pytest_cudagraph.integrated.statistics import CompilerStatistics, InferenceResult, ModelStatistics

__all__ = [
    "CompilerStatistics",
    "InferenceResult",
    "IntegratedAOTCompiler",
    "ModelStatistics",
    "OptimizedModel",
    "create_integrated_compiler",
]
