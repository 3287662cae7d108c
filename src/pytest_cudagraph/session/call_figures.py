"""Recorded calls beside the model of their test in a baseline: ``perf_monitor.expect("decode", baseline=report)``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_cudagraph.errors import ExpectationMissed, InputError
from pytest_cudagraph.foreign import value_text
from pytest_cudagraph.session.context import FixtureContext
from pytest_cudagraph.session.state_keys import OUTCOMES
from pytest_cudagraph.settings.case import CallSettings

if TYPE_CHECKING:
    from pytest_cudagraph.monitor import CallMonitor
    from pytest_cudagraph.values import BatchReport, GraphReport, Latency

_LEAST_CALLS = 10
"""With fewer, a lower quartile says nothing."""


def judge_calls(
    context: FixtureContext, calls: CallMonitor, name: str, report: GraphReport, batch_size: int | None
) -> None:
    """Compare the calls of a name with those that the entry of ``report`` keeps, and keep them for it.

    Does nothing without ``--cudagraph``. Raises :class:`~pytest_cudagraph.errors.SlowerThanBaseline`,
    :class:`~pytest_cudagraph.errors.ExpectationMissed` with fewer than 10 calls, and
    :class:`~pytest_cudagraph.errors.InputError` for what is no report of this test.
    """
    __tracebackhide__ = True
    from pytest_cudagraph import gate
    from pytest_cudagraph.values import GraphReport, Verdict

    if not isinstance(report, GraphReport):
        raise InputError(f"baseline takes the report that cudagraph returned; found {value_text(report)}")
    if not context.settings.enabled:
        return
    reports = context.stash[OUTCOMES]
    # An earlier call of expect has replaced it.
    places = {each.name: place for place, each in enumerate(reports) if each.nodeid == context.nodeid}
    if report.name not in places:
        raise InputError(f"baseline takes a report of the same test; found one of {report.nodeid}")
    place = places[report.name]
    kept, figures = reports[place], _figures(calls, name)
    batch = _batch_of(kept, batch_size)
    if batch.timing is None or batch.receipt is None:
        return
    measured = context.device_context().measured_batch(
        kept.name, batch.batch_size, batch.timing, batch.receipt, figures
    )
    judgements = gate.judge_figures(measured, context.resolve(CallSettings(compile=kept.compile_mode)).max_slowdown)
    new = replace(batch, figures={**batch.figures, **figures}, judgements=(*batch.judgements, *judgements))
    reports[place] = replace(kept, batches=tuple(new if each is batch else each for each in kept.batches))
    if any(each.verdict is not Verdict.PASSED for each in judgements):
        context.end_with(reports[place])


def _batch_of(report: GraphReport, batch_size: int | None) -> BatchReport:
    sizes = [each.batch_size for each in report.batches]
    if batch_size not in sizes and (batch_size is not None or len(sizes) != 1):
        raise InputError(f"batch_size takes one of the sizes of the report, {sizes}; found {value_text(batch_size)}")
    return report.at(sizes[0] if batch_size is None else batch_size)


def _figures(calls: CallMonitor, name: str) -> dict[str, Latency]:
    """The time of a call, and of a token where the calls have tokens."""
    from pytest_cudagraph.stats import summaries

    records = [each for each in calls.records() if each.name == name and not each.failure]
    if len(records) < _LEAST_CALLS:
        raise ExpectationMissed(f"{name}: a baseline keeps at least {_LEAST_CALLS} calls; found {len(records)}")
    found = {f"{name}: time per call": summaries.latency_summary([max(each.duration_ns, 1) for each in records])}
    per_token = [max(each.duration_ns, 1) / each.tokens for each in records if each.tokens]
    if len(per_token) == len(records):
        found[f"{name}: time per token"] = summaries.latency_summary(per_token)
    return found
