"""The story of one model: audit, compile, capture, check, measure, gate. The only place that knows the order."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_cudagraph import audit, capture, check, compile, gate, hazards
from pytest_cudagraph.compile import Compiled
from pytest_cudagraph.errors import CudagraphError, EagerFailed, GraphTestFailure, InputError
from pytest_cudagraph.pipeline.batch_timing import TimingRequest, left_as_it_was, time_batch
from pytest_cudagraph.pipeline.device_context import DeviceContext
from pytest_cudagraph.pipeline.model_errors import failure_in, fix_for, judgement_of, places_of
from pytest_cudagraph.pipeline.prepared_model import PreparedModel, run_eagerly
from pytest_cudagraph.pipeline.stage_objects import receipt_of
from pytest_cudagraph.protocols import CapturedGraph, Model, ShowProgress
from pytest_cudagraph.units import to_ns
from pytest_cudagraph.values import Agreement, BatchReport, Comparison, Disagreement, GraphReport, Judgement, Timing

if TYPE_CHECKING:
    from pytest_cudagraph.settings.case import Case


def run_stages(model_run: ModelRun) -> GraphReport:
    """Run every stage in order, as far as the story holds, and report."""
    __tracebackhide__ = True
    for stage in (
        model_run.run_eager,
        model_run.audit,
        model_run.compile,
        model_run.capture,
        model_run.check,
        model_run.measure,
    ):
        model_run.run(stage)
        if model_run.has_ended:
            break
    return model_run.report()


class ModelRun:
    """One subject on one bench. Each method is one stage; a stage that finds against the model ends the story.

    A context manager: leaving it releases graphs, pools and compiled packages, also after an exception.
    """

    def __init__(
        self,
        case: Case,
        device_context: DeviceContext,
        subject: PreparedModel,
        *,
        cache_folder: Callable[[], Path],
        compile_timeout_s: float,
        progress: ShowProgress,
    ) -> None:
        self.case, self.device_context, self.subject = case, device_context, subject
        self._cache_folder, self._compile_timeout_s = cache_folder, compile_timeout_s
        self._progress = progress
        self._resources = ExitStack()
        self.is_closed = False
        self._audit = audit.Audit()
        self._compiled: Compiled | None = None
        self._judgements: list[Judgement] = []
        self._of_batch: dict[int, list[Judgement]] = {size: [] for size in subject.examples}
        self.graphs: Mapping[int, CapturedGraph] = {}
        self.agreements: Mapping[int, Agreement | Disagreement] = {}
        self._captures: capture.Captures | None = None
        self._timings: dict[int, Timing] = {}
        self._comparisons: dict[int, Comparison] = {}

    def __enter__(self) -> ModelRun:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Release everything held; a second call does nothing."""
        self.is_closed, self.graphs, self._captures = True, {}, None
        self._resources.close()

    @property
    def has_ended(self) -> bool:
        """Whether some stage has found against the model."""
        found = itertools.chain(self._judgements, *self._of_batch.values())
        return any(judgement.verdict.fails for judgement in found)

    @property
    def _seed(self) -> int:
        """The same for the same test, so that a run can be repeated; it stands in the report."""
        return zlib.crc32(self.case.name.encode())

    def run(self, stage: Callable[[], None]) -> None:
        """Run one stage. What the model raises in it is raised as the test's failure, with the report so far.

        Raises :class:`~pytest_cudagraph.errors.GraphTestFailure` from the model's own exception.
        """
        __tracebackhide__ = True
        try:
            stage()
        except (EagerFailed, CudagraphError) as failure:
            self._end(failure, judgement_of(stage.__name__, failure))
            raise
        except Exception as error:
            found = failure_in(stage.__name__, error)
            if found is None:
                raise
            self._end(*found)
            raise found[0] from error

    def _end(self, failure: GraphTestFailure | CudagraphError, judgement: Judgement) -> None:
        told = self._reached_sizes
        for size in told:
            self._of_batch[size].append(judgement)
        if not told:
            self._judgements.append(judgement)
        failure.report = self.report()

    def run_eager(self) -> None:
        """Call the model as it is, once per batch size."""
        __tracebackhide__ = True
        subject = self.subject
        run_eagerly(subject.eager, subject.examples, self.device_context.backend, subject.resizing)

    def audit(self) -> None:
        """Look for hazards in the eager model, at the smallest batch size and, by the rules, at the largest."""
        self._tell("audit")
        smallest, *others = (self.subject.examples[size] for size in sorted(self.subject.examples))
        self._audit = audit.audit(
            self.subject.eager, smallest, self.device_context.backend, others[-1] if others else None
        )
        errors = [finding for finding in self._audit.findings if finding.level == "error"]
        self._judgements += [gate.judge_finding(finding) for finding in errors]

    def compile(self) -> None:
        """Compile the model for each batch size; a failure is a judgement, never silence."""
        self._tell(f"compile ({self.case.compile})")
        with left_as_it_was(self.subject, self.device_context):
            try:
                self._compiled = self._resources.enter_context(self._compile())
            except InputError:
                raise
            except CudagraphError as error:
                self._judgements.append(gate.judge_compile_failure(error))

    def _compile(self) -> Compiled:
        return compile.compile_model(
            self.subject.eager,
            self.subject.examples,
            self.case.compile,
            self.device_context.backend,
            cache_dir=self._cache_folder() if self.case.compile == "aot" else Path(),
            time_limit_s=self._compile_timeout_s,
        )

    def call_for(self, batch_size: int) -> Model:
        """What is captured at a batch size: the compiled code, or the model itself."""
        return self._compiled.call_for(batch_size) if self._compiled else self.subject.eager

    def capture(self) -> None:
        """Capture every batch size into one pool, and see that each graph holds something."""
        pool = self._resources.enter_context(self.device_context.backend.pool())
        captures = capture.capture_batches(
            self.call_for,
            self.subject.examples,
            pool,
            model=self.subject.eager,
            backend=self.device_context.backend,
            executions=self._compiled.executions if self._compiled else lambda _: None,
            progress=self._tell,
        )
        # Held as long as the graphs are: it keeps memory alive that they read by address.
        self._captures, self.graphs = captures, captures.graphs
        for batch_size, graph in self.graphs.items():
            self._of_batch[batch_size].append(gate.judge_capture(graph.receipt))
        if captures.refused is not None and captures.refused_batch is not None:
            fix = f"fix: {captures.refused.fix or hazards.CATALOGUE[captures.refused.hazard].fix}"
            self._of_batch[captures.refused_batch].append(gate.refused(captures.refused, fix=fix))

    def check(self) -> None:
        """Prove replays against eager; a second call proves them anew."""
        self.agreements = check.check_replays(
            self.graphs,
            lambda _: self.subject.eager,
            self.subject.examples,
            model=self.subject.eager,
            backend=self.device_context.backend,
            seed=self._seed,
            rtol=self.case.rtol,
            atol=self.case.atol,
            captured_at=self._captures.addresses if self._captures else None,
            captured_for=self.call_for,
            progress=self._tell,
        )
        for batch_size, found in self.agreements.items():
            places = places_of(found, self.subject.eager)
            self._replace(batch_size, gate.judge_agreement(found, places=places, fix=fix_for(found)))

    def measure(self) -> None:
        """Time and gate every batch size, the structure first: it is exact. A second call measures anew."""
        for batch_size in self.case.batch_sizes:
            timing, disturbance = time_batch(self._trial(batch_size), self.subject, self.device_context, self._tell)
            self._timings[batch_size] = timing
            for judgement in self._gate(batch_size, timing, disturbance):
                self._replace(batch_size, judgement)

    def _trial(self, batch_size: int) -> TimingRequest:
        return TimingRequest(
            batch_size=batch_size,
            graph=self.graphs[batch_size],
            compiled=None if self.case.compile == "none" else self.call_for(batch_size),
            min_speedup=self.case.min_speedup[batch_size],
            budget_ns=to_ns(self.case.time_budget),
            seed=self._seed + batch_size,
        )

    def _gate(self, batch_size: int, timing: Timing, disturbance: str) -> tuple[Judgement, ...]:
        device_context, case = self.device_context, self.case
        saved, receipt = device_context.held_to(case.name, batch_size), self.graphs[batch_size].receipt
        of_baseline, self._comparisons[batch_size] = gate.judge_baseline(
            timing,
            saved,
            case.max_slowdown,
            device_context.device,
            judged=device_context.judged,
            why_not=device_context.why_not,
            disturbance=disturbance,
            receipt=receipt,
            update_option=device_context.update_option,
        )
        of_speedup = gate.judge_speedup(
            timing,
            case.min_speedup[batch_size],
            judged=device_context.judged,
            why_not=device_context.why_not,
            baseline=saved,
            device=device_context.device,
            disturbance=disturbance,
            receipt=receipt,
        )
        # Counts are exact and shown in any case; what is being replaced on request holds nobody back.
        allowed = None if device_context.replaces else case.max_new_kernels
        before = device_context.find_saved(case.name, batch_size)
        return (
            gate.judge_structure(receipt, before, allowed, device=device_context.device),
            of_speedup,
            of_baseline,
        )

    def report(self) -> GraphReport:
        """What is known by now."""
        compile_ns = self._compiled.compile_ns if self._compiled else {}
        return GraphReport(
            nodeid=self.case.nodeid,
            name=self.case.name,
            device=self.device_context.device,
            compile_mode=self.case.compile,
            batches=tuple(self._batch_report(size, compile_ns.get(size)) for size in self._reached_sizes),
            findings=self._audit.findings,
            judgements=tuple(self._judgements),
            compile_ns=sum(compile_ns.values()) if compile_ns else None,
            not_judged=self._audit.not_judged,
            notes=self._audit.notes,
            min_source=self.case.min_source,
            update_option=self.device_context.update_option,
        )

    @property
    def _reached_sizes(self) -> list[int]:
        """The batch sizes that some stage has come to."""
        return [size for size in self.case.batch_sizes if self._of_batch[size]]

    def _batch_report(self, size: int, compile_ns: int | None) -> BatchReport:
        graph, agreement = self.graphs.get(size), self.agreements.get(size)
        return BatchReport(
            batch_size=size,
            judgements=tuple(self._of_batch[size]),
            min_speedup=self.case.min_speedup[size],
            receipt=receipt_of(graph, agreement) if graph else None,
            agreement=agreement if isinstance(agreement, Agreement) else None,
            timing=self._timings.get(size),
            baseline=self.device_context.find_saved(self.case.name, size),
            comparison=self._comparisons.get(size, "off"),
            compile_ns=compile_ns,
        )

    def _tell(self, line: str) -> None:
        self._progress(f"{self.case.name.rpartition('::')[2]}: {line}")

    def _replace(self, batch_size: int, judgement: Judgement) -> None:
        """A stage told again replaces what it found before."""
        kept = [each for each in self._of_batch[batch_size] if each.gate != judgement.gate]
        self._of_batch[batch_size] = [*kept, judgement]
