"""CUDA graph performance regressions as ordinary pytest failures.

The public names. Each is loaded at its first use, because every pytest run imports the package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_cudagraph.compile import compile_model
    from pytest_cudagraph.decoding.decoder import Decoder
    from pytest_cudagraph.decoding.engine import DecodeEngine
    from pytest_cudagraph.decoding.errors import (
        EngineFailed,
        FellBackToEager,
        InvalidOutput,
        LogitsNotFinite,
        StepNotReplayed,
        TokenMismatch,
        TokenNotAllowed,
        TooFewTokensPerStep,
        TooManyBytes,
        TooMuchOverhead,
    )
    from pytest_cudagraph.decoding.grammars import Grammar, choice, ebnf, json_schema, python_source, regex
    from pytest_cudagraph.decoding.modes.engines import Engine, EngineFacts, LoadedEngine, LoadRequest
    from pytest_cudagraph.decoding.modes.transformers_engine import TransformersEngine, transformers_engine
    from pytest_cudagraph.decoding.modes.vllm_engine import VllmEngine, vllm
    from pytest_cudagraph.decoding.results import GenerationReceipt
    from pytest_cudagraph.decoding.transformers_decoder import StaticDecoder, static_decoder
    from pytest_cudagraph.errors import (
        AuditFailed,
        BaselineError,
        CaptureFailed,
        CaptureRefusal,
        CompileFailed,
        CompileTimeout,
        CudagraphError,
        DeadTensorError,
        DeviceUnavailable,
        EagerFailed,
        ExpectationMissed,
        GraphTestFailure,
        InconclusiveWarning,
        InputError,
        NotProven,
        ReplayMismatch,
        RevisionError,
        SlowerThanBase,
        SlowerThanBaseline,
        SpeedupTooLow,
        TooManyKernels,
    )
    from pytest_cudagraph.gate import judge_speedup
    from pytest_cudagraph.measure import Arms, Bounds, PerfCounterClock, measure_arms
    from pytest_cudagraph.monitor import PerfCard, PerfMonitor
    from pytest_cudagraph.own_graphs.watch import graph_watch
    from pytest_cudagraph.serving.calls import CallMonitor, CallSummary
    from pytest_cudagraph.serving.drop_in import IntegratedAOTCompiler, OptimizedModel, create_integrated_compiler
    from pytest_cudagraph.serving.drop_in_statistics import CompilerStatistics, InferenceResult, ModelStatistics
    from pytest_cudagraph.serving.graph_runner import GraphRunner
    from pytest_cudagraph.serving.statistics import FormStatistics, RunnerStatistics
    from pytest_cudagraph.serving.tuning import TuningReport, tune
    from pytest_cudagraph.session.context import FixtureContext
    from pytest_cudagraph.session.scenario_run import ScenarioContext, run_scenario
    from pytest_cudagraph.settings.case import CallSettings
    from pytest_cudagraph.settings.registered import FeatureMark
    from pytest_cudagraph.stats import EvidenceRule
    from pytest_cudagraph.values import (
        AuditRule,
        BatchReport,
        Column,
        Finding,
        GraphReport,
        Judgement,
        MeasuredBatch,
        ReportColumn,
        Scenario,
        Table,
        Timing,
        Verdict,
    )

__version__ = "0.1.0"

__all__ = [
    "Arms",
    "AuditFailed",
    "AuditRule",
    "BaselineError",
    "BatchReport",
    "Bounds",
    "CallMonitor",
    "CallSettings",
    "CallSummary",
    "CaptureFailed",
    "CaptureRefusal",
    "Column",
    "CompileFailed",
    "CompileTimeout",
    "CompilerStatistics",
    "CudagraphError",
    "DeadTensorError",
    "DecodeEngine",
    "Decoder",
    "DeviceUnavailable",
    "EagerFailed",
    "Engine",
    "EngineFacts",
    "EngineFailed",
    "EvidenceRule",
    "ExpectationMissed",
    "FeatureMark",
    "FellBackToEager",
    "Finding",
    "FixtureContext",
    "FormStatistics",
    "GenerationReceipt",
    "Grammar",
    "GraphReport",
    "GraphRunner",
    "GraphTestFailure",
    "InconclusiveWarning",
    "InferenceResult",
    "InputError",
    "IntegratedAOTCompiler",
    "InvalidOutput",
    "Judgement",
    "LoadRequest",
    "LoadedEngine",
    "LogitsNotFinite",
    "MeasuredBatch",
    "ModelStatistics",
    "NotProven",
    "OptimizedModel",
    "PerfCard",
    "PerfCounterClock",
    "PerfMonitor",
    "ReplayMismatch",
    "ReportColumn",
    "RevisionError",
    "RunnerStatistics",
    "Scenario",
    "ScenarioContext",
    "SlowerThanBase",
    "SlowerThanBaseline",
    "SpeedupTooLow",
    "StaticDecoder",
    "StepNotReplayed",
    "Table",
    "Timing",
    "TokenMismatch",
    "TokenNotAllowed",
    "TooFewTokensPerStep",
    "TooManyBytes",
    "TooManyKernels",
    "TooMuchOverhead",
    "TransformersEngine",
    "TuningReport",
    "Verdict",
    "VllmEngine",
    "choice",
    "compile_model",
    "create_integrated_compiler",
    "ebnf",
    "graph_watch",
    "json_schema",
    "judge_speedup",
    "measure_arms",
    "python_source",
    "regex",
    "run_scenario",
    "static_decoder",
    "transformers_engine",
    "tune",
    "vllm",
]

_HOMES = {
    name: home
    for home, names in {
        "compile": "compile_model",
        "gate": "judge_speedup",
        "decoding.decoder": "Decoder",
        "decoding.engine": "DecodeEngine",
        "decoding.errors": "EngineFailed FellBackToEager InvalidOutput LogitsNotFinite StepNotReplayed TokenMismatch "
        "TokenNotAllowed TooFewTokensPerStep TooManyBytes TooMuchOverhead",
        "decoding.grammars": "Grammar choice ebnf json_schema python_source regex",
        "decoding.modes.engines": "Engine EngineFacts LoadRequest LoadedEngine",
        "decoding.modes.vllm_engine": "VllmEngine vllm",
        "decoding.results": "GenerationReceipt",
        "decoding.transformers_decoder": "StaticDecoder static_decoder",
        "decoding.modes.transformers_engine": "TransformersEngine transformers_engine",
        "measure": "Arms Bounds PerfCounterClock measure_arms",
        "monitor": "PerfCard PerfMonitor",
        "own_graphs.watch": "graph_watch",
        "serving.calls": "CallMonitor CallSummary",
        "serving.drop_in": "IntegratedAOTCompiler OptimizedModel create_integrated_compiler",
        "serving.graph_runner": "GraphRunner",
        "serving.drop_in_statistics": "CompilerStatistics InferenceResult ModelStatistics",
        "serving.statistics": "FormStatistics RunnerStatistics",
        "stats": "EvidenceRule",
        "serving.tuning": "TuningReport tune",
        "session.context": "FixtureContext",
        "session.scenario_run": "ScenarioContext run_scenario",
        "settings.case": "CallSettings",
        "settings.registered": "FeatureMark",
        "values": "AuditRule BatchReport Column Finding GraphReport Judgement MeasuredBatch ReportColumn Scenario "
        "Table Timing Verdict",
    }.items()
    for name in names.split()
}
"""The module of each name; errors are in ``errors``."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
