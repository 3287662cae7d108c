"""The run of one model: eager, audit, compile, capture, check, measure, gate. Only this module knows the order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_cudagraph import audit, gate, hazards
from pytest_cudagraph.check import Tolerance
from pytest_cudagraph.check.batch_check import SLOW_S
from pytest_cudagraph.errors import CudagraphError, EagerFailed, GraphTestFailure, InputError
from pytest_cudagraph.pipeline.batch_timing import TimingRequest, time_batch
from pytest_cudagraph.pipeline.device_context import DeviceContext
from pytest_cudagraph.pipeline.model_errors import failure_in, fix_for, judgement_of, places_of
from pytest_cudagraph.pipeline.prepared_model import PreparedModel, run_eagerly
from pytest_cudagraph.pipeline.run_results import RunResults
from pytest_cudagraph.pipeline.stages import Stages
from pytest_cudagraph.protocols import Model, ShowProgress
from pytest_cudagraph.settings.case import Case
from pytest_cudagraph.units import NS_PER_S, seconds_text, to_ns
from pytest_cudagraph.values import Agreement, AuditRule, Disagreement, GraphReport, Judgement, MeasuredBatch, Timing

_SLOW_NS = SLOW_S * NS_PER_S
_NOTABLE_NS = 20 * NS_PER_S

_CALLS_OF_STORY = 15
"""Of the time of one eager call at each size: all stages of a slow model, by ``benchmarks/story.py --calls``."""


def _call_times(batch_sizes: Iterable[int], readings_ns: Sequence[float]) -> dict[int, float]:
    """The time of each call, in ns. The first call may load libraries, and so counts as the second at most."""
    times_ns = [later - earlier for earlier, later in itertools.pairwise(readings_ns)]
    times_ns[:1] = [min(times_ns[:2])]
    return dict(zip(batch_sizes, times_ns, strict=True))


def run_stages(run: ModelRun) -> GraphReport:
    """Run the stages in order. A stage that finds an error in the model is the last one."""
    __tracebackhide__ = True
    for stage in (run.run_eager, run.audit, run.compile, run.capture, run.check, run.measure):
        run.run(stage)
        if run.has_failed:
            break
    return run.finish()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRun:
    """One prepared model on one device. Each public method from :meth:`run_eager` on is one stage.

    A context manager: leaving it releases graphs, pools and compiled packages, also after an exception.
    ``dataclasses.replace`` gives the same run with another case; results and resources are shared.
    """

    case: Case
    device_context: DeviceContext
    model: PreparedModel
    cache_folder: Callable[[], Path]
    compile_timeout_s: float
    progress: ShowProgress
    audit_rules: Sequence[AuditRule] = ()
    """The rules of other plugins for their own operators."""
    results: RunResults = field(default_factory=RunResults)
    _resources: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> ModelRun:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Release everything held. A second call does nothing."""
        self.results.release_graphs()
        self._resources.close()

    @property
    def has_failed(self) -> bool:
        """Whether a stage found an error in the model."""
        return self.results.has_failed

    def with_tolerance(self, rtol: float | None, atol: float | None, draw: Any) -> ModelRun:
        """The same run, whose check allows this and draws its inputs so. None: as before."""
        case = self.case
        case = replace(case, rtol=case.rtol if rtol is None else rtol, atol=case.atol if atol is None else atol)
        return replace(self, case=case, model=self.model if draw is None else self.model.drawing(draw))

    def with_gates(self, asked: Case, reset: Any) -> ModelRun:
        """The same run, judged by the speedup and the slowdown of ``asked``, and reset so before each call."""
        gates = {key: getattr(asked, key) for key in ("min_speedup", "max_slowdown", "min_source")}
        return replace(self, case=replace(self.case, **gates), model=replace(self.model, reset=reset))

    def run(self, stage: Callable[[], None]) -> None:
        """Run one stage. An exception of the model is raised as the test's failure, with the report so far.

        Raises :class:`~pytest_cudagraph.errors.GraphTestFailure` from the model's own exception.
        """
        __tracebackhide__ = True
        try:
            with self.device_context.using_its_threads():
                stage()
        except (EagerFailed, CudagraphError) as failure:
            self._attach_report(failure, judgement_of(stage.__name__, failure))
            raise
        except Exception as error:
            explained = failure_in(stage.__name__, error)
            if explained is None:
                raise
            self._attach_report(*explained)
            raise explained[0] from error

    def _attach_report(self, failure: GraphTestFailure | CudagraphError, judgement: Judgement) -> None:
        sizes = self.results.reached_sizes
        for size in sizes:
            self.results.judge(size, judgement)
        if not sizes:
            self.results.judgements.append(judgement)
        failure.report = self.results.report(self.case, self.device_context)

    def run_eager(self) -> None:
        """Call the model once per batch size, without a graph."""
        __tracebackhide__ = True
        results, now_ns = self.results, self.device_context.clock.now_ns
        readings_ns = [now_ns()]
        results.constants = run_eagerly(self.model, self.device_context.backend, lambda: readings_ns.append(now_ns()))
        results.eager_ns = _call_times(self.model.examples, readings_ns)
        self._tell_expected_time()

    def _tell_expected_time(self) -> None:
        slow_ns = sum(call_ns for call_ns in self.results.eager_ns.values() if call_ns > _SLOW_NS)
        if not slow_ns:
            return
        measure_ns = (
            0 if self.device_context.why_not_judged else len(self.model.examples) * to_ns(self.case.time_budget)
        )
        expected_ns = _CALLS_OF_STORY * slow_ns + measure_ns
        text = f"the whole test takes some {seconds_text(expected_ns)}"
        self._show(f"{text}, beside compiling")
        if expected_ns > _NOTABLE_NS:
            slowest_ns = max(self.results.eager_ns.values())
            self.results.notes.append(f"eager calls take up to {seconds_text(slowest_ns)}: {text}, beside compiling")

    def audit(self) -> None:
        """Look for hazards at the smallest batch size and, by the rules alone, at the largest."""
        self._show("audit")
        smallest, *others = (self.model.examples[size] for size in sorted(self.model.examples))
        largest = others[-1] if others else None
        backend, constants = self.device_context.backend, self.results.constants
        audited = audit.audit(self.model.eager, smallest, backend, largest, constants, self.audit_rules)
        audited = self.results.audit = audit.with_accepted(audited, self.case.accept)
        errors = [finding for finding in audited.findings if finding.level == "error"]
        self.results.judgements += [gate.judge_finding(finding) for finding in errors]

    def compile(self) -> None:
        """Compile the model for each batch size. A failed compile is a judgement."""
        self._show(f"compile ({self.case.compile})")
        try:
            cache_dir = self.cache_folder() if self.case.compile == "aot" else Path()
            compiled = self._stages.compile(self.case.compile, cache_dir=cache_dir, time_limit_s=self.compile_timeout_s)
        except InputError:
            raise
        except CudagraphError as error:
            self.results.judgements.append(gate.judge_compile_failure(error))
        else:
            self.results.compiled = self._resources.enter_context(compiled)

    def call_for(self, batch_size: int) -> Model:
        """What is captured at a batch size: the compiled code, or the model itself."""
        __tracebackhide__ = True
        compiled = self.results.compiled
        return compiled.call_for(batch_size) if compiled else self.model.eager

    def capture(self) -> None:
        """Capture every batch size into one pool. An empty or refused capture is a judgement."""
        results, pool = self.results, self._resources.enter_context(self.device_context.backend.pool())
        captures = results.captures = self._stages.capture(pool, results.compiled)
        for batch_size, graph in captures.graphs.items():
            results.judge(batch_size, gate.judge_capture(graph.receipt))
        if captures.refused is not None and captures.refused_batch is not None:
            fix = f"fix: {captures.refused.fix or hazards.CATALOGUE[captures.refused.hazard].fix}"
            results.judge(captures.refused_batch, gate.refused(captures.refused, fix=fix))

    def check(self) -> None:
        """Compare replays with eager on fresh inputs. A second call compares again."""
        results = self.results
        results.agreements = self._stages.check(
            results.graphs, results.compiled, results.captures,
            seed=self.case.seed, rtol=self.case.rtol, atol=self.case.atol,
        )  # fmt: skip
        for batch_size, agreement in results.agreements.items():
            self._judge_agreement(batch_size, agreement)

    def _judge_agreement(self, batch_size: int, agreement: Agreement | Disagreement) -> None:
        places = places_of(agreement, self.model.eager)
        self.results.judge(batch_size, gate.judge_agreement(agreement, places=places, fix=fix_for(agreement)))

    def measure(self) -> None:
        """Time and judge every batch size. A second call measures again."""
        for batch_size in self.case.batch_sizes:
            agreement = self.results.agreements.get(batch_size)
            request = TimingRequest(
                batch_size=batch_size,
                graph=self.results.graphs[batch_size],
                compiled=None if self.case.compile == "none" else self.call_for(batch_size),
                min_speedup=self.case.min_speedup[batch_size],
                budget_ns=to_ns(self.case.time_budget),
                seed=self.case.seed + batch_size,
                constants=self.results.constants,
                agreement=agreement if isinstance(agreement, Agreement) else None,
                tolerance=Tolerance(rtol=self.case.rtol, atol=self.case.atol),
                is_brief=self._is_brief(batch_size),
            )
            timing, difference = time_batch(request, self.model, self.device_context, self._show)
            if difference is not None:  # a wrong graph has no time
                self._judge_agreement(batch_size, difference)
                continue
            self._gate(batch_size, timing)
            if self.case.min_over_compiled is not None:
                self._gate_over_compiled(request, self.case.min_over_compiled)

    def _is_brief(self, batch_size: int) -> bool:
        """Whether speed is not judged and calls are slow: then the smallest size alone is measured in full."""
        is_slow = self.results.eager_ns.get(batch_size, 0) > _SLOW_NS
        return bool(self.device_context.why_not_judged) and is_slow and batch_size > min(self.case.batch_sizes)

    def _gate(self, batch_size: int, timing: Timing) -> None:
        case, results = self.case, self.results
        receipt = results.graphs[batch_size].receipt
        batch = self.device_context.measured_batch(case.name, batch_size, timing, receipt)
        batch = replace(batch, test=case.nodeid)
        latency, comparison = gate.judge_baseline(batch, case.max_slowdown)
        results.measured[batch_size], results.comparisons[batch_size] = batch, comparison
        # The structure first: it is exact.
        results.judge(batch_size, gate.judge_structure(batch, case.max_new_kernels))
        results.judge(batch_size, gate.judge_speedup(batch, case.min_speedup[batch_size]))
        results.judge(batch_size, latency)

    def _gate_over_compiled(self, request: TimingRequest, least: float) -> None:
        """A measurement of its own: what decides about eager says little about the compiled code."""
        request = replace(request, min_speedup=least, over_compiled=True)
        timing, _ = time_batch(request, self.model, self.device_context, self._show)
        batch = MeasuredBatch(
            timing=timing, device=self.device_context.device, why_not_judged=self.device_context.why_not_judged
        )
        self.results.judge(request.batch_size, gate.judge_speedup(batch, least, over="compiled"))

    def finish(self) -> GraphReport:
        """The report of what the stages found."""
        return self.results.report(self.case, self.device_context)

    @property
    def _stages(self) -> Stages:
        return Stages(
            model=self.model.eager, examples=self.model.examples, backend=self.device_context.backend,
            constants=self.results.constants, progress=self._show,
        )  # fmt: skip

    def _show(self, line: str) -> None:
        self.progress(f"{self.case.name.rpartition('::')[2]}: {line}")
