"""The facts that stages pass to each other.

Every class is frozen. It imports neither torch nor pytest and computes only derived figures. Times are in
nanoseconds (``_ns``), memory in bytes (``_bytes``), ratios are plain factors (``_ratio``): 1.15 means 15 % faster.
"""

from pytest_cudagraph.values.evidence import (
    Agreement,
    Assigned,
    AuditRule,
    Disagreement,
    Finding,
    Judgement,
    Level,
    Receipt,
    Site,
    Verdict,
)
from pytest_cudagraph.values.reports import BatchReport, CompileMode, GraphReport, MinSource, ReportColumn
from pytest_cudagraph.values.saved import (
    BaseComparison,
    Comparison,
    LatencyChange,
    MeasuredBatch,
    NoBaseline,
    SavedBatch,
    SavedFigure,
    Session,
)
from pytest_cudagraph.values.scenario import Addition, Column, Scenario, StoredScenario, Table, stored
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
