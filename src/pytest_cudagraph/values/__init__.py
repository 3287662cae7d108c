"""The facts that stages pass to each other.

Every class is frozen. It imports neither torch nor pytest and computes only derived figures. Times are in
nanoseconds (``_ns``), memory in bytes (``_bytes``), ratios are plain factors (``_ratio``): 1.15 means 15 % faster.
"""

from pytest_cudagraph.values.engine_modes import EngineMode, EngineModes, ModeFailure, ModeTokens, Stage
from pytest_cudagraph.values.evidence import Agreement, Assigned, Disagreement, Finding, Level, Receipt, Site
from pytest_cudagraph.values.generation import (
    Counted,
    Generation,
    GenerationReceipt,
    GenerationTimes,
    Lookup,
    Prefill,
    PrefillBytes,
    TokenAgreement,
    TokenDifference,
)
from pytest_cudagraph.values.guided import DisallowedToken, GrammarKind, Guided, GuidedOutput, GuidedTimes
from pytest_cudagraph.values.reports import (
    BatchReport,
    CompileMode,
    GateName,
    GraphReport,
    Judgement,
    MinSource,
    Verdict,
)
from pytest_cudagraph.values.saved import (
    BaseComparison,
    Comparison,
    LatencyChange,
    MeasuredBatch,
    NoBaseline,
    SavedBatch,
    Session,
)
from pytest_cudagraph.values.timings import (
    Block,
    Decision,
    DeviceInfo,
    Interval,
    Kind,
    Latency,
    Medians,
    Timing,
    UndecidedState,
    is_emulated,
)

__all__ = [
    "Agreement",
    "Assigned",
    "BaseComparison",
    "BatchReport",
    "Block",
    "Comparison",
    "CompileMode",
    "Counted",
    "Decision",
    "DeviceInfo",
    "Disagreement",
    "DisallowedToken",
    "EngineMode",
    "EngineModes",
    "Finding",
    "GateName",
    "Generation",
    "GenerationReceipt",
    "GenerationTimes",
    "GrammarKind",
    "GraphReport",
    "Guided",
    "GuidedOutput",
    "GuidedTimes",
    "Interval",
    "Judgement",
    "Kind",
    "Latency",
    "LatencyChange",
    "Level",
    "Lookup",
    "MeasuredBatch",
    "Medians",
    "MinSource",
    "ModeFailure",
    "ModeTokens",
    "NoBaseline",
    "Prefill",
    "PrefillBytes",
    "Receipt",
    "SavedBatch",
    "Session",
    "Site",
    "Stage",
    "Timing",
    "TokenAgreement",
    "TokenDifference",
    "UndecidedState",
    "Verdict",
    "is_emulated",
]
