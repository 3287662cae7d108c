"""One batch size timed: the arms, the stopping rule, and the state that calls change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from pytest_cudagraph import measure, pytree, stats
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.inputs.example import opaque_arguments
from pytest_cudagraph.monitor import PerfMonitor
from pytest_cudagraph.pipeline.device_context import DeviceContext
from pytest_cudagraph.pipeline.prepared_model import PreparedModel
from pytest_cudagraph.protocols import CapturedGraph, Model, ShowProgress, StoppingRule, TellsBusyTime
from pytest_cudagraph.state import Snapshot
from pytest_cudagraph.units import NS_PER_S, seconds_text
from pytest_cudagraph.values import Timing


class CallArguments:
    """An example's own tensors, in dicts and lists made anew: what a model adds to them or takes out stays in them."""

    def __init__(self, example: Example) -> None:
        self._example = example
        self.is_changed = False
        """Whether a call was seen to leave the containers other than it found them."""
        self.args: tuple[Any, ...]
        self.kwargs: dict[str, Any]
        self.renew()

    def renew(self) -> None:
        """The containers as they were before any call."""
        self.args, self.kwargs = pytree.map_tensors(lambda tensor: tensor, (self._example.args, self._example.kwargs))

    def look(self) -> bool:
        """Whether the calls since the last :meth:`renew` have changed the containers; they are made anew if so."""
        before, structure = pytree.flatten((self._example.args, self._example.kwargs))
        now, structure_now = pytree.flatten((self.args, self.kwargs))
        same = structure == structure_now and all(one is other for one, other in zip(before, now, strict=True))
        self.is_changed = not same
        if self.is_changed:
            self.renew()
        return self.is_changed


_MIN_TIME_NS = 0.25 * NS_PER_S
"""A verdict after less would fall within one burst of a noisy neighbour (docs/statistics.md)."""

_BUSY_NS = 0.02 * NS_PER_S
_MOST_PASSES = 15
"""A diagnostic: a few replays, of twenty milliseconds together, are enough to say what a graph could gain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingRequest:
    """What is timed at one batch size. ``compiled`` is None where nothing was compiled."""

    batch_size: int
    graph: CapturedGraph
    compiled: Model | None
    min_speedup: float
    budget_ns: float
    seed: int


@contextmanager
def left_as_it_was(subject: PreparedModel, device_context: DeviceContext) -> Iterator[Snapshot]:
    """Calls inside move counters, caches and generators on; the test's model must not notice."""
    extras = opaque_arguments(subject.examples.values())
    before, rng = Snapshot.take(subject.eager, extras=extras), device_context.backend.rng_state()
    try:
        yield before
    finally:
        before.restore()
        device_context.backend.set_rng_state(rng)


def time_batch(
    trial: TimingRequest, subject: PreparedModel, device_context: DeviceContext, progress: ShowProgress
) -> tuple[Timing, str]:
    """The timing, and what kept the device from being judged (empty if nothing did).

    Blocks during which the device was throttled or shared are thrown away and retried within the budget.
    """
    backend, readings = (
        device_context.backend,
        device_context.reference.readings() if device_context.reference else None,
    )

    def between_blocks(spent_ns: float, bound_ns: float) -> None:
        if readings is not None:
            readings.keep_up(spent_ns)
        of = f"{seconds_text(spent_ns)} of at most {seconds_text(bound_ns)}"
        progress(f"measure batch {trial.batch_size}, {of}")

    watching = PerfMonitor(waiting_processes=device_context.waiting_processes)
    with left_as_it_was(subject, device_context) as before, backend.running(), watching as watch:
        given = CallArguments(subject.examples[trial.batch_size])
        prepare = _preparation(subject, before, given)
        timing = measure.measure(
            _arms(trial, subject, given),
            clock=device_context.clock,
            rule=_rule(trial, device_context),
            bounds=measure.Bounds.of_budget(trial.budget_ns),
            seed=trial.seed,
            synchronize=backend.synchronize,
            prepare=prepare,
            event_timer=backend.event_timer(),
            progress=between_blocks,
            # A CPU's clocks and neighbours are everyday noise, which the statistics bear.
            vet=watch.check if backend.kind == "cuda" else None,
        )
        busy_ns = _busy_ns(trial.graph, timing, prepare)
    timing = replace(timing, reference=readings.latency() if readings else None, busy_ns=busy_ns)
    # What was decided was decided on undisturbed blocks alone.
    return timing, timing.disturbance if timing.decision == "open" else ""


def _busy_ns(graph: CapturedGraph, timing: Timing, prepare: Callable[[], None] | None) -> float | None:
    """What the operations of a replay take by themselves, the least of a few; a device's events tell it as well."""
    if not isinstance(graph, TellsBusyTime):
        return timing.device_replay.median_ns if timing.device_replay else None
    passes = min(max(int(_BUSY_NS / timing.replay.median_ns), 1), _MOST_PASSES)
    found_ns = []
    for _ in range(passes):
        if prepare is not None:
            prepare()
        found_ns.append(graph.busy_ns())
    return min(found_ns)


def _arms(trial: TimingRequest, subject: PreparedModel, given: CallArguments) -> measure.Arms:
    eager, compiled, graph = subject.eager, trial.compiled, trial.graph
    if given.is_changed:
        return measure.Arms(
            eager=lambda: eager(*given.args, **given.kwargs),
            replay=lambda: graph(*given.args, **given.kwargs),
            compiled=None if compiled is None else lambda: compiled(*given.args, **given.kwargs),
        )
    args, kwargs = given.args, given.kwargs
    return measure.Arms(
        eager=lambda: eager(*args, **kwargs),
        replay=lambda: graph(*args, **kwargs),
        compiled=None if compiled is None else lambda: compiled(*args, **kwargs),
    )


def _rule(trial: TimingRequest, device_context: DeviceContext) -> StoppingRule:
    # A budget shorter than the usual minimum could never decide.
    min_time_ns = min(_MIN_TIME_NS, trial.budget_ns / 4)
    if device_context.judged:
        return stats.EvidenceRule(trial.min_speedup, min_time_ns=min_time_ns)
    return stats.FixedTimeRule(time_ns=min_time_ns)


def _preparation(subject: PreparedModel, before: Snapshot, given: CallArguments) -> Callable[[], None] | None:
    """What brings back the state that a call moves on, and the containers it changes, found by one call.

    None for a model that does neither: nothing then comes between its calls.
    """
    subject.eager(*given.args, **given.kwargs)
    written = before.changes().written
    rewind = before.rewinder(written) if written else None
    if not given.look():
        return rewind

    def prepare() -> None:
        given.renew()
        if rewind is not None:
            rewind()

    return prepare
