"""The result of one model's run: verdicts, judgements, reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from pytest_cudagraph.values.evidence import Agreement, Finding, Judgement, Receipt, Verdict
from pytest_cudagraph.values.saved import BaseComparison, Comparison, NoBaseline, SavedBatch
from pytest_cudagraph.values.scenario import Scenario, StoredScenario
from pytest_cudagraph.values.timings import DeviceInfo, Interval, Latency, Timing

CompileMode = Literal["none", "inductor", "aot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MinSource:
    """Where the least speedup of a test is set, and so where a smaller one must be written."""

    place: Literal["argument", "marker", "setting"] = "setting"
    is_mapping: bool = False
    """Whether it is a mapping from batch sizes, which also selects the batch sizes."""
    marker: str = "graph_speedup(min"
    """The marker and its key."""
    default_sizes: tuple[int, ...] = ()
    """The batch sizes that the mapping leaves out. Their least speedup is that of the settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """Everything known of one batch size at the end of its run."""

    batch_size: int
    judgements: tuple[Judgement, ...]
    min_speedup: float | None = None
    receipt: Receipt | None = None
    agreement: Agreement | None = None
    timing: Timing | None = None
    baseline: SavedBatch | NoBaseline | None = None
    comparison: Comparison = "off"
    compile_ns: int | None = None
    base: BaseComparison | None = None
    scenario: Scenario | StoredScenario | None = None
    """What a feature measured. None for the graph of a model."""
    speedup: Interval | None = None
    """Of a scenario that measures without :attr:`timing`, for the table of the run."""
    figures: Mapping[str, Latency] = field(default_factory=dict)
    """Of recorded calls that a baseline keeps beside the replay. Larger is slower."""

    @property
    def has_entry(self) -> bool:
        """Whether a baseline can have an entry of it. A scenario says whether it timed a graph."""
        return self.scenario is None or self.scenario.has_entry

    @property
    def verdict(self) -> Verdict:
        """The worst of the judgements. Not judged if there are none."""
        return max((j.verdict for j in self.judgements), key=lambda v: v.severity, default=Verdict.NOT_JUDGED)

    @property
    def valid_timing(self) -> Timing | None:
        """None where the graph is wrong or missing: its latency is not the model's."""
        return None if self.verdict in (Verdict.WRONG, Verdict.NOT_CAPTURED) else self.timing

    @property
    def worst(self) -> Judgement | None:
        """The first judgement that carries the verdict."""
        return next((j for j in self.judgements if j.verdict is self.verdict), None)

    def judged_by(self, gate: str) -> Judgement | None:
        """The judgement of one gate."""
        return next((judgement for judgement in self.judgements if judgement.gate == gate), None)

    @property
    def word(self) -> str:
        """The verdict in tables and counts. From the baseline gate also ``slower`` or ``no baseline yet``."""
        if self.worst is not None and self.worst.gate == "baseline":
            if self.verdict is Verdict.FAILED:
                return "slower"
            if self.verdict is Verdict.NOT_JUDGED and self.comparison == "new":
                return "no baseline yet"
        return self.verdict.words


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphReport:
    """What the ``cudagraph`` fixture returns: one model, all its batch sizes."""

    nodeid: str
    name: str
    device: DeviceInfo | None
    compile_mode: CompileMode
    batches: tuple[BatchReport, ...] = ()
    findings: tuple[Finding, ...] = ()
    judgements: tuple[Judgement, ...] = ()
    """Judgements of the model as a whole: audit errors, a failed compile."""
    compile_ns: int | None = None
    not_judged: tuple[str, ...] = ()
    """What no stage could inspect (custom operators, opaque outputs)."""
    notes: tuple[str, ...] = ()
    """What is allowed and rarely intended: a model in training mode."""
    min_source: MinSource = MinSource()
    update_option: str = "--cudagraph-update"
    """The option that saves an entry on this device."""
    gpu: str = ""
    """The UUID of the GPU that an xdist worker had for itself. Empty elsewhere."""

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the model and of its batch sizes. Not judged if there is none."""
        verdicts = [j.verdict for j in self.judgements] + [b.verdict for b in self.batches]
        return max(verdicts, key=lambda v: v.severity, default=Verdict.NOT_JUDGED)

    def at(self, batch_size: int) -> BatchReport:
        """The report of one batch size. Raises :class:`KeyError` with the existing sizes."""
        __tracebackhide__ = True
        for batch in self.batches:
            if batch.batch_size == batch_size:
                return batch
        sizes = [each.batch_size for each in self.batches]
        raise KeyError(f"no batch size {batch_size}; {f'there are {sizes}' if sizes else 'without --cudagraph none'}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportColumn:
    """A column that another plugin adds to the table."""

    title: str
    cell: Callable[[GraphReport, BatchReport], str]
    """The text of one row. Where it raises, the cell shows the class of the error."""
    right: bool = True
    """Whether it is aligned right, as numbers are."""
