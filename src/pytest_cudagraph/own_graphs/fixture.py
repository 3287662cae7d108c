"""``cudagraph.own(...)``: prove and gate a runner that captures its own graphs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch

from pytest_cudagraph import gate, measure, pipeline
from pytest_cudagraph.check.compare import Tolerance
from pytest_cudagraph.errors import InputError
from pytest_cudagraph.foreign import value_text
from pytest_cudagraph.own_graphs.proof import prove
from pytest_cudagraph.own_graphs.result import OwnGraphs, judge_proof, not_judged
from pytest_cudagraph.own_graphs.trial import Claim, OutputRule
from pytest_cudagraph.own_graphs.watch import GraphWatch, graph_watch
from pytest_cudagraph.pipeline.batch_timing import ArmsBudget, CallArguments, preparation, time_arms
from pytest_cudagraph.pipeline.prepared_model import PreparedModel
from pytest_cudagraph.session.context import FixtureContext
from pytest_cudagraph.session.scenario_run import ScenarioContext, run_scenario
from pytest_cudagraph.settings.case import CallSettings, Case, ModelCall
from pytest_cudagraph.state import Snapshot
from pytest_cudagraph.units import NS_PER_S
from pytest_cudagraph.values import BatchReport, Receipt

_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """The arguments of one call that are about the runner. Raises :class:`InputError`."""

    runner: Callable[..., Any]
    outputs: OutputRule
    between: Callable[[], object] | None
    reset: Callable[[], object] | None
    steps: int | None
    threads: int
    streams: bool
    max_growth_bytes: int
    made: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not callable(self.runner):
            raise InputError(f"own takes a runner, or a function that makes one; found {value_text(self.runner)}")
        if self.outputs not in get_args(OutputRule):
            raise InputError(f"outputs is one of {', '.join(get_args(OutputRule))}; found {value_text(self.outputs)}")
        for name, function in (("between", self.between), ("reset", self.reset)):
            if function is not None and not callable(function):
                raise InputError(f"{name} takes a function without arguments; found {value_text(function)}")
        for name, count in (("steps", self.steps), ("threads", self.threads), ("max_growth", self.max_growth_bytes)):
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
                raise InputError(f"{name} takes a whole number from 0; found {value_text(count)}")

    def make(self) -> Callable[..., Any]:
        """The runner: made now by a function without arguments, so that its captures are seen."""
        self.made[:] = [self.runner() if _takes_nothing(self.runner) else self.runner]
        return self.made[0]  # type: ignore[no-any-return]


def _takes_nothing(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return not any(each.kind is not each.VAR_KEYWORD and each.default is each.empty for each in parameters)


def own(
    context: FixtureContext,
    runner: Callable[..., Any],
    *example_inputs: Any,
    eager: Callable[..., Any],
    kwargs: Mapping[str, Any] | None = None,
    batch_sizes: Sequence[int] | None = None,
    batch_dim: Any = 0,
    outputs: OutputRule = "kept",
    between: Callable[[], object] | None = None,
    reset: Callable[[], object] | None = None,
    steps: int | None = None,
    threads: int = 0,
    streams: bool = False,
    max_growth: int = 0,
    min_speedup: float | Mapping[int, float] | None = None,
    max_slowdown: float | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    draw: Callable[[Any], Any] | Sequence[Any] | None = None,
    name: str | None = None,
) -> tuple[BatchReport, ...]:
    """Prove that a runner which captures its own graphs computes what ``eager`` computes, and gate its speed.

    ``runner`` is a function without arguments that makes the runner, so that its captures are seen, or a runner that
    captures at its first calls. Batch sizes may lie between the captured ones. ``outputs``: ``kept`` (they stay as
    they are) or ``borrowed`` (lent until the next call). ``between`` is the program's own step between replays: a
    weight update, a switch of adapters. ``reset`` brings runner and model back to where calls may start anew.
    ``steps``: calls in a row from one state (16 where eager writes its state). ``threads``: that many call at once.
    ``streams``: callers use streams of their own. ``max_growth``: bytes that may be reserved more after calls that were
    all made before. The other arguments are those of ``cudagraph``.

    Returns one report per batch size. Raises :class:`~pytest_cudagraph.own_graphs.result.OwnGraphsFailed` with the
    first thing that is wrong, :class:`~pytest_cudagraph.errors.GraphTestFailure` by the gate that is missed, and
    :class:`~pytest_cudagraph.errors.InputError`.
    """
    __tracebackhide__ = True
    request = _Request(
        runner=runner, outputs=outputs, between=between, reset=reset, steps=steps, threads=threads, streams=streams,
        max_growth_bytes=max_growth,
    )  # fmt: skip
    settings = CallSettings(batch_sizes=batch_sizes, min_speedup=min_speedup, max_slowdown=max_slowdown, rtol=rtol,
                            atol=atol, name=name, has_rows=batch_dim is not None and bool(example_inputs))  # fmt: skip
    call = ModelCall(
        model=eager, args=example_inputs, kwargs=dict(kwargs or {}), batch_dim=batch_dim, draw=draw, settings=settings
    )
    return run_scenario(
        context,
        {"own": settings},
        once=lambda case: _once(call, case),
        run=lambda scene: _batches(request, call, scene),
    )


def _once(call: ModelCall, case: Case) -> None:
    pipeline.run_once(call, case)


def _batches(request: _Request, call: ModelCall, scene: ScenarioContext) -> Iterator[BatchReport]:
    device = scene.device_context.device
    if device.kind != "cuda":
        judged = not_judged(f"{device.kind}: {device.name}")
        yield from (BatchReport(batch_size=size, judgements=(judged,)) for size in scene.case.batch_sizes)
        return
    model = pipeline.prepare_model(call, scene.case, scene.device_context.backend)
    if model.is_copy:
        raise InputError("eager must be on the device of the runner; found a module on the CPU: move it with .cuda()")
    with graph_watch() as watch, torch.no_grad():
        scene.progress("prove the runner")
        claim = _claim(request, model, scene.case)
        trouble, calls = prove(claim, request.make, watch)
    judged = judge_proof(trouble, calls, watch.captures, watch.lines())
    for size in scene.case.batch_sizes:
        report = BatchReport(
            batch_size=size,
            judgements=(judged,),
            min_speedup=scene.case.min_speedup[size],
            scenario=_result(size, calls, watch),
        )
        yield report if trouble else _measured(report, request, model, scene)


def _claim(request: _Request, model: PreparedModel, case: Case) -> Claim:
    return Claim(
        eager=model.eager,
        examples=model.examples,
        outputs=request.outputs,
        reset=request.reset,
        between=request.between,
        steps=request.steps,
        threads=request.threads,
        streams=request.streams,
        max_growth_bytes=request.max_growth_bytes,
        tolerance=Tolerance(rtol=case.rtol, atol=case.atol),
    )


def _result(size: int, calls: int, watch: GraphWatch) -> OwnGraphs:
    return OwnGraphs(
        batch_size=size,
        calls=calls,
        graphs=sum(graph.replays > 0 for graph in watch.graphs),
        captures=watch.captures,
        replays=watch.replays,
        pool_bytes=sum(graph.pool_bytes for graph in watch.graphs),
    )


def _measured(report: BatchReport, request: _Request, model: PreparedModel, scene: ScenarioContext) -> BatchReport:
    """The speed of the runner's calls against eager's, with all that the runner does around its replays."""
    case, device_context, size = scene.case, scene.device_context, report.batch_size
    arguments, runner = CallArguments(model.examples[size]), request.made[0]
    budget = ArmsBudget(min_speedup=case.min_speedup[size], budget_ns=case.time_budget * NS_PER_S, seed=_SEED)
    before = Snapshot.take(model.eager)
    with torch.no_grad():
        prepare = preparation(model.eager, before, [arguments], request.reset)
        arms = measure.Arms(eager=arguments.bound(model.eager), replay=arguments.bound(runner))
        timing = time_arms(arms, budget, prepare, device_context, lambda line: scene.progress(f"batch {size}, {line}"))
    before.restore()
    receipt = Receipt(batch_size=size, operations=None, kernels=None, not_counted="the graphs are the runner's own")
    batch = device_context.measured_batch(case.name, size, timing, receipt)
    latency, comparison = gate.judge_baseline(batch, case.max_slowdown)
    speed = (gate.judge_speedup(batch, budget.min_speedup), latency)
    return replace(
        report, judgements=(*report.judgements, *speed), timing=timing, receipt=receipt, baseline=batch.saved,
        comparison=comparison,
    )  # fmt: skip
