"""What the stages of one run have shown so far, and its report."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from pytest_cudagraph.audit import Audit
from pytest_cudagraph.capture import Captures
from pytest_cudagraph.compile import Compiled
from pytest_cudagraph.pipeline.device_context import DeviceContext
from pytest_cudagraph.protocols import CapturedGraph
from pytest_cudagraph.settings.case import Case
from pytest_cudagraph.state import NO_CONSTANTS, Constants
from pytest_cudagraph.values import (
    Agreement,
    BatchReport,
    Comparison,
    Disagreement,
    GraphReport,
    Judgement,
    MeasuredBatch,
    Receipt,
)


@dataclass(slots=True, kw_only=True)
class RunResults:
    """Results by stage. Each stage of a :class:`~pytest_cudagraph.pipeline.model_run.ModelRun` adds its own."""

    constants: Constants = NO_CONSTANTS
    """The parameters that eager calls do not write."""
    eager_ns: dict[int, float] = field(default_factory=dict)
    """The time of the first eager call at each batch size."""
    notes: list[str] = field(default_factory=list)
    audit: Audit = field(default_factory=Audit)
    compiled: Compiled | None = None
    captures: Captures | None = None
    """Held as long as the graphs are used: it keeps memory alive that they read by address."""
    agreements: Mapping[int, Agreement | Disagreement] = field(default_factory=dict)
    measured: dict[int, MeasuredBatch] = field(default_factory=dict)
    """The timing of each batch size, beside what is saved of it."""
    comparisons: dict[int, Comparison] = field(default_factory=dict)
    judgements: list[Judgement] = field(default_factory=list)
    """Of the model as a whole."""
    of_batch: dict[int, list[Judgement]] = field(default_factory=dict)
    """Judgements by batch size, at most one per gate."""
    is_closed: bool = False

    @property
    def graphs(self) -> Mapping[int, CapturedGraph]:
        """By batch size. Empty before the capture and after the run."""
        return self.captures.graphs if self.captures else {}

    def release_graphs(self) -> None:
        """Forget the graphs, because their memory is released at the end of the run."""
        self.is_closed, self.captures = True, None

    @property
    def reached_sizes(self) -> list[int]:
        """The batch sizes that some stage judged."""
        return sorted(self.of_batch)

    @property
    def has_failed(self) -> bool:
        """Whether a judgement fails the test."""
        return any(judgement.verdict.fails for judgement in itertools.chain(self.judgements, *self.of_batch.values()))

    def judge(self, batch_size: int, judgement: Judgement) -> None:
        """Add a judgement. It replaces an earlier one of the same gate: a stage may run again."""
        kept = [each for each in self.of_batch.get(batch_size, ()) if each.gate != judgement.gate]
        self.of_batch[batch_size] = [*kept, judgement]

    def receipt_of(self, batch_size: int) -> Receipt | None:
        """What was captured, how often it was replayed since, and whether a call bypassed the graph."""
        graph, checked = self.graphs.get(batch_size), self.agreements.get(batch_size)
        if graph is None:
            return None
        fallbacks = (checked.message,) if isinstance(checked, Disagreement) and checked.where == "graph" else ()
        return replace(graph.receipt, replays=graph.replays, fallbacks=fallbacks)

    def report(self, case: Case, device_context: DeviceContext) -> GraphReport:
        """Everything found so far."""
        compile_ns = self.compiled.compile_ns if self.compiled else {}
        sizes = [size for size in case.batch_sizes if size in self.of_batch]
        return GraphReport(
            nodeid=case.nodeid,
            name=case.name,
            device=device_context.device,
            compile_mode=case.compile,
            batches=tuple(self._batch_report(size, case, device_context) for size in sizes),
            findings=self.audit.findings,
            judgements=tuple(self.judgements),
            compile_ns=sum(compile_ns.values()) if compile_ns else None,
            not_judged=(*self.audit.not_judged, *self._not_judged_by_the_check()),
            notes=(*self.notes, *self.audit.notes),
            min_source=case.min_source,
            update_option=device_context.update_option,
        )

    def _not_judged_by_the_check(self) -> Iterator[str]:
        agreements = (each for each in self.agreements.values() if isinstance(each, Agreement))
        return itertools.chain.from_iterable(each.not_judged for each in agreements)

    def _batch_report(self, size: int, case: Case, device_context: DeviceContext) -> BatchReport:
        agreement, measured = self.agreements.get(size), self.measured.get(size)
        return BatchReport(
            batch_size=size,
            judgements=tuple(self.of_batch[size]),
            min_speedup=case.min_speedup[size],
            receipt=self.receipt_of(size),
            agreement=agreement if isinstance(agreement, Agreement) else None,
            timing=measured.timing if measured else None,
            baseline=measured.saved if measured else device_context.find_saved(case.name, size),
            comparison=self.comparisons.get(size, "off"),
            compile_ns=self.compiled.compile_ns.get(size) if self.compiled else None,
        )
