"""Time one batch size: the arms, the stopping rule, and the state that calls change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pytest_cudagraph import measure, pytree, stats
from pytest_cudagraph.check import Tolerance, lasting_difference, reset_difference
from pytest_cudagraph.errors import InputError
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.monitor import PerfMonitor
from pytest_cudagraph.pipeline.device_context import DeviceContext
from pytest_cudagraph.pipeline.prepared_model import PreparedModel
from pytest_cudagraph.pipeline.stages import Stages
from pytest_cudagraph.protocols import Backend, CapturedGraph, MeasuresBusyTime, Model, ShowProgress, StoppingRule
from pytest_cudagraph.state import NO_CONSTANTS, Constants, Snapshot
from pytest_cudagraph.units import NS_PER_S, seconds_text
from pytest_cudagraph.values import Agreement, Disagreement, Timing


class CallArguments:
    """An example's own tensors in new dicts and lists, so that a model's changes to containers stay in these."""

    def __init__(self, example: Example) -> None:
        self._example = example
        self.is_changed = False
        """Whether a call changed the containers."""
        self.args: tuple[Any, ...]
        self.kwargs: dict[str, Any]
        self.renew()

    def renew(self) -> None:
        """The containers as they were before any call."""
        self.args, self.kwargs = pytree.map_tensors(lambda tensor: tensor, (self._example.args, self._example.kwargs))

    def look(self) -> bool:
        """Whether the calls since the last :meth:`renew` changed the containers. Then they are renewed."""
        before, structure = pytree.flatten((self._example.args, self._example.kwargs))
        now, structure_now = pytree.flatten((self.args, self.kwargs))
        same = structure == structure_now and all(one is other for one, other in zip(before, now, strict=True))
        self.is_changed = not same
        if self.is_changed:
            self.renew()
        return self.is_changed

    def bound(self, call: Model) -> Callable[[], object]:
        """The call with these arguments."""
        if self.is_changed:
            return lambda: call(*self.args, **self.kwargs)
        # Without the look-ups of attributes, which would be part of every timed call.
        args, kwargs = self.args, self.kwargs
        return lambda: call(*args, **kwargs)


def preparation(
    model: Model,
    before: Snapshot,
    arguments: Sequence[CallArguments],
    reset: Callable[[], object] | None = None,
) -> Callable[[], object] | None:
    """What restores the state and the containers that a call changes. One call of each finds them, or ``reset``.

    None for a model that changes neither: nothing then runs between its calls.
    """
    written: dict[str, None] = {}
    for index, example in enumerate(arguments):
        if index:
            before.rewinder()()
        model(*example.args, **example.kwargs)
        written |= dict.fromkeys(before.changes().written)
    rewind = reset or (before.rewinder(written) if written else None)
    changed = [example for example in arguments if example.look()]
    if not changed:
        return rewind

    def prepare() -> None:
        for example in changed:
            example.renew()
        if rewind is not None:
            rewind()

    return prepare


_MIN_TIME_NS = 0.25 * NS_PER_S
"""A verdict after less would fall within one burst of a noisy neighbour (docs/statistics.md)."""

_BRIEF = (
    "slow calls whose speed is not judged: the operations are not timed alone, and eager is not compared with a replay "
    "once more"
)

_BUSY_NS = 0.02 * NS_PER_S
_MOST_PASSES = 15
"""For a diagnostic a few replays are enough, 20 ms together: they show what a graph could gain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingRequest:
    """What is timed at one batch size. ``compiled`` is None where nothing was compiled."""

    batch_size: int
    graph: CapturedGraph
    compiled: Model | None
    min_speedup: float
    budget_ns: float
    seed: int
    constants: Constants = NO_CONSTANTS
    over_compiled: bool = False
    """Whether the replay is timed against the compiled code. ``eager`` of the result is then this code."""
    agreement: Agreement | None = None
    """What the check has shown. None: the results after the measurement are not compared."""
    tolerance: Tolerance = field(default_factory=Tolerance)
    is_brief: bool = False
    """Whether the two arms are all that is timed and called."""


class TimedBatch(NamedTuple):
    """The timing, and how eager differs from a replay after all these calls."""

    timing: Timing
    difference: Disagreement | None


def time_batch(
    request: TimingRequest, model: PreparedModel, device_context: DeviceContext, progress: ShowProgress
) -> TimedBatch:
    """Measure eager against replay at one batch size, and compare them once more.

    Blocks in which the device was throttled or shared are discarded and measured again within the budget.
    """
    backend = device_context.backend
    stages = Stages(model=model.eager, examples=model.examples, backend=backend, constants=request.constants)
    with stages.restored() as before, backend.running():
        arguments = CallArguments(model.examples[request.batch_size])
        _check_reset(request, model, backend)
        prepare = preparation(model.eager, before, [arguments], model.reset)
        budget = ArmsBudget(min_speedup=request.min_speedup, budget_ns=request.budget_ns, seed=request.seed)

        def show(line: str) -> None:
            progress(f"measure batch {request.batch_size}, {line}")

        timing = time_arms(_arms(request, model, arguments), budget, prepare, device_context, show)
        if request.is_brief:
            return TimedBatch(replace(timing, notes=(*timing.notes, _BRIEF)), None)
        timing = replace(timing, busy_ns=_busy_ns(request.graph, timing, prepare))
        return TimedBatch(timing, _lasting_difference(request, model, backend, before, prepare))


def _lasting_difference(
    request: TimingRequest,
    model: PreparedModel,
    backend: Backend,
    before: Snapshot,
    prepare: Callable[[], object] | None,
) -> Disagreement | None:
    if request.agreement is None or request.over_compiled:
        return None
    return lasting_difference(
        model.eager,
        request.graph,
        model.examples[request.batch_size],
        backend,
        before,
        seed=request.seed,
        rewind=prepare,
        is_exact=request.agreement.bit_exact,
        tolerance=request.tolerance,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmsBudget:
    """What a measurement is to decide, and how long it may take."""

    min_speedup: float
    budget_ns: float
    seed: int


def time_arms(
    arms: measure.Arms,
    budget: ArmsBudget,
    prepare: Callable[[], object] | None,
    device_context: DeviceContext,
    progress: ShowProgress,
) -> Timing:
    """Measure the arms on a device, with its monitor, its reference workload and its rule."""
    backend, reference = device_context.backend, device_context.reference
    readings = reference.readings() if reference else None

    def between_blocks(spent_ns: float, bound_ns: float) -> None:
        if readings is not None:
            readings.keep_up(spent_ns)
        of = f"{seconds_text(spent_ns)} of at most {seconds_text(bound_ns)}"
        progress(of)

    with PerfMonitor(waiting_processes=device_context.waiting_processes) as watch:
        timing = device_context.measure(
            arms,
            clock=device_context.clock,
            rule=_rule(budget, device_context),
            bounds=_bounds(budget, device_context),
            seed=budget.seed,
            synchronize=backend.synchronize,
            prepare=prepare,
            event_timer=backend.event_timer(),
            progress=between_blocks,
            # A CPU's clocks and neighbours are everyday noise. The statistics allow for it.
            disturbance=watch.check if backend.kind == "cuda" else None,
            # On a GPU the host waits by design.
            cpu_time_ns=device_context.clock.cpu_time_ns if backend.kind == "cpu" else None,
        )
    return replace(timing, reference=readings.latency() if readings else None)


def _busy_ns(graph: CapturedGraph, timing: Timing, prepare: Callable[[], object] | None) -> float | None:
    """The time of a replay's operations alone: the least of a few replays, or the median of device events."""
    if not isinstance(graph, MeasuresBusyTime):
        return timing.device_replay.median_ns if timing.device_replay else None
    passes = min(max(int(_BUSY_NS / timing.replay.median_ns), 1), _MOST_PASSES)
    times_ns = []
    for _ in range(passes):
        if prepare is not None:
            prepare()
        times_ns.append(graph.busy_ns())
    return min(times_ns)


def _arms(request: TimingRequest, model: PreparedModel, arguments: CallArguments) -> measure.Arms:
    eager, compiled, graph = model.eager, request.compiled, request.graph
    if request.over_compiled and compiled is not None:
        eager, compiled = compiled, None
    bound = arguments.bound
    return measure.Arms(eager=bound(eager), replay=bound(graph), compiled=None if compiled is None else bound(compiled))


_UNJUDGED_NS = 0.5 * NS_PER_S
"""Where speed is not judged, its figures are worth no more time. Slow calls are then timed in the warm-up only."""


def _bounds(budget: ArmsBudget, device_context: DeviceContext) -> measure.Bounds:
    if not device_context.why_not_judged:
        return measure.Bounds.of_budget(budget.budget_ns)
    bound_ns = min(budget.budget_ns, _UNJUDGED_NS)
    return measure.Bounds(first_ns=bound_ns, extended_ns=bound_ns)


def _rule(budget: ArmsBudget, device_context: DeviceContext) -> StoppingRule:
    # A budget shorter than the usual minimum could never decide.
    min_time_ns = min(_MIN_TIME_NS, budget.budget_ns / 4)
    if not device_context.why_not_judged:
        return stats.EvidenceRule(budget.min_speedup, min_time_ns=min_time_ns)
    return stats.FixedTimeRule(time_ns=min_time_ns)


def _check_reset(request: TimingRequest, model: PreparedModel, backend: Backend) -> None:
    if model.reset is None:
        return
    difference = reset_difference(
        model.eager,
        model.reset,
        model.examples[request.batch_size],
        backend,
        batch_size=request.batch_size,
        seed=request.seed,
        constants=request.constants,
    )
    if not difference:
        return
    remedy = "write the values from before the call in place, as in position.fill_(n), or leave reset out"
    if model.is_copy:
        remedy = "the model is a copy on the GPU of the test's model on the CPU. Make the model on cudagraph.device"
    raise InputError(
        f"batch {request.batch_size}: reset must let each call do the same; {difference}\n  to fix: {remedy}"
    )
