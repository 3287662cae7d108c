"""Everything of one model, at the end of its story."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from pytest_cudagraph.values.evidence import Agreement, Finding, Receipt
from pytest_cudagraph.values.machine import DeviceInfo
from pytest_cudagraph.values.saved import BaseComparison, Comparison, NoBaseline, SavedBatch
from pytest_cudagraph.values.timings import Timing

GateName = Literal["eager", "audit", "compile", "capture", "check", "speedup", "baseline", "structure", "base"]


class Verdict(str, Enum):
    """What a test has shown of one batch size, or of the whole test (the worst of its batch sizes)."""

    PASSED = "passed"
    NOT_JUDGED = "not-judged"
    INCONCLUSIVE = "inconclusive"
    FAILED = "failed"
    WRONG = "wrong"
    NOT_CAPTURED = "not-captured"

    @property
    def severity(self) -> int:
        """0 for passed, rising to the worst."""
        return list(Verdict).index(self)

    @property
    def fails(self) -> bool:
        """Whether a test with this verdict fails without strict mode."""
        return self in (Verdict.FAILED, Verdict.WRONG, Verdict.NOT_CAPTURED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What one gate says of one batch size: a sentence (allowed, found), its evidence, its remedy."""

    gate: GateName
    verdict: Verdict
    reason: str
    evidence: tuple[str, ...] = ()
    remedy: str = ""
    accept: float | None = None
    """What the gate's setting would have to be for what was found to pass; None where no setting is the remedy."""
    hazard: str = ""
    """The id in the catalogue, where a hazard of the model is the cause; its page tells more."""


CompileMode = Literal["none", "inductor", "aot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MinSource:
    """Who asks for the least speedup of a test: the place that has to change for less to be accepted."""

    place: Literal["argument", "marker", "setting"] = "setting"
    is_mapping: bool = False
    """Whether it is given per batch size, and so names the batch sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """Everything known of one batch size at the end of its story."""

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

    @property
    def verdict(self) -> Verdict:
        """The worst of the judgements; not judged when there is none."""
        return max((j.verdict for j in self.judgements), key=lambda v: v.severity, default=Verdict.NOT_JUDGED)

    @property
    def worst(self) -> Judgement | None:
        """The first judgement that carries the verdict."""
        return next((j for j in self.judgements if j.verdict is self.verdict), None)

    @property
    def word(self) -> str:
        """The verdict as tables and counts say it; by the baseline gate ``slower``, or ``missing`` for want of one."""
        if self.worst is not None and self.worst.gate == "baseline":
            if self.verdict is Verdict.FAILED:
                return "slower"
            if self.verdict is Verdict.NOT_JUDGED and self.comparison == "new":
                return "missing"
        return self.verdict.value.replace("-", " ")


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
    """What concerns the model as a whole: audit errors, a failed compile."""
    compile_ns: int | None = None
    not_judged: tuple[str, ...] = ()
    """What no stage could look into (custom operators, opaque outputs)."""
    notes: tuple[str, ...] = ()
    """What is legal and seldom meant: a model in training mode."""
    min_source: MinSource = MinSource()
    update_option: str = "--cudagraph-update"
    """What has to be asked for, for an entry to be written where this was measured."""

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the model and of its batch sizes; not judged when nothing was."""
        found = [j.verdict for j in self.judgements] + [b.verdict for b in self.batches]
        return max(found, key=lambda v: v.severity, default=Verdict.NOT_JUDGED)

    def at(self, batch_size: int) -> BatchReport:
        """The report of one batch size; :class:`KeyError` names those there are."""
        for batch in self.batches:
            if batch.batch_size == batch_size:
                return batch
        raise KeyError(f"no batch size {batch_size}; there are {[b.batch_size for b in self.batches]}")
