"""Runs a scenario of a feature: its name, its settings, one eager call, its device, its report, the test's outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from pytest_cudagraph.errors import CaptureRefusal
from pytest_cudagraph.session.context import FixtureContext
from pytest_cudagraph.session.exceptions import hide_plugin_frames
from pytest_cudagraph.settings.case import CallSettings, Case

if TYPE_CHECKING:
    from pytest_cudagraph.pipeline import DeviceContext
    from pytest_cudagraph.protocols import ShowProgress
    from pytest_cudagraph.values import BatchReport, GraphReport

_R = TypeVar("_R")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioContext:
    """What a scenario runs with."""

    case: Case
    """Its settings, resolved."""
    device_context: DeviceContext
    """The backend, the clock, and the saved entries."""
    progress: ShowProgress
    """Shows a line on a terminal."""

    @classmethod
    def of(cls, context: FixtureContext, case: Case) -> ScenarioContext:
        """On the device of the case."""
        return cls(case=case, device_context=context.device_context(case.device), progress=context.progress)


@hide_plugin_frames
def run_scenario(
    context: FixtureContext,
    calls: Mapping[str, CallSettings],
    *,
    once: Callable[[Case], Iterable[BatchReport] | None],
    run: Callable[[ScenarioContext], Iterable[BatchReport]],
    notes: Callable[[BatchReport], Iterable[str]] = lambda batch: (),
) -> tuple[BatchReport, ...]:
    """Run a scenario with the settings of each call, and end the test by what was judged.

    ``calls`` have the settings by the part of the name that is theirs: each makes a report ``test[part]``. ``run``
    gives the batches of a report, each with its judgements and its :class:`~pytest_cudagraph.values.Scenario`. A
    capture that it has refused is a report too. Without ``--cudagraph`` only ``once`` is called, for the first call.
    Returns the batches. Raises a subclass of :class:`~pytest_cudagraph.GraphTestFailure` by the gate that is missed.
    """
    __tracebackhide__ = True
    from pytest_cudagraph.baseline import parametrized

    cases = [
        context.case(replace(call, name=parametrized(call.name or context.nodeid, part)))
        for part, call in calls.items()
    ]
    if not context.settings.enabled:
        return tuple(once(cases[0]) or ())
    return tuple(batch for case in cases for batch in _run_case(context, case, run, notes))


def _run_case(
    context: FixtureContext,
    case: Case,
    run: Callable[[ScenarioContext], Iterable[BatchReport]],
    notes: Callable[[BatchReport], Iterable[str]],
) -> Sequence[BatchReport]:
    __tracebackhide__ = True
    scene = ScenarioContext.of(context, case)
    try:
        with scene.device_context.using_its_threads():
            batches = tuple(run(scene))
    except CaptureRefusal as refused:
        context.conclude(_report(scene, refused=refused))
        raise
    report = replace(_report(scene, batches), notes=tuple(note for batch in batches for note in notes(batch)))
    return context.conclude(report).batches


def _report(
    scene: ScenarioContext, batches: Sequence[BatchReport] = (), *, refused: CaptureRefusal | None = None
) -> GraphReport:
    from pytest_cudagraph import gate, hazards
    from pytest_cudagraph.values import GraphReport

    fix = "" if refused is None else f"fix: {refused.fix or hazards.CATALOGUE[refused.hazard].fix}"
    return GraphReport(
        nodeid=scene.case.nodeid,
        name=scene.case.name,
        device=scene.device_context.device,
        compile_mode="none",
        batches=tuple(batches),
        judgements=() if refused is None else (gate.refused(refused, fix=fix),),
        min_source=scene.case.min_source,
        update_option=scene.device_context.update_option,
    )


def results(batches: Iterable[BatchReport], kind: type[_R]) -> tuple[_R, ...]:
    """The scenarios of one class."""
    return tuple(batch.scenario for batch in batches if isinstance(batch.scenario, kind))
