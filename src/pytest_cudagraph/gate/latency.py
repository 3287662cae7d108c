"""The latency gate: a replay's latency against the sessions in the baseline."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace

from pytest_cudagraph import baseline as baselines
from pytest_cudagraph.gate.wording import FIGURES, change_text, changes_text, moved_text, not_judged, software_changes
from pytest_cudagraph.units import percent_text, plural, signed_text, span_text
from pytest_cudagraph.values import (
    Comparison,
    DeviceInfo,
    Judgement,
    LatencyChange,
    MeasuredBatch,
    NoBaseline,
    Receipt,
    SavedBatch,
    Verdict,
)

_REPLACED = NoBaseline(comparison="off", reason="the saved entry is being replaced (--cudagraph-update)")


def judge_baseline(batch: MeasuredBatch, max_slowdown: float) -> tuple[Judgement, Comparison]:
    """Failed when the slowdown is above ``max_slowdown`` with confidence, passed when it is not, else inconclusive.

    ``max_slowdown`` is a fraction. The confidence comes from the prediction interval over the saved sessions
    (:class:`~pytest_cudagraph.values.LatencyChange`). A batch without an entry of the same hardware does not fail.
    The comparison is made even where speed is not judged.
    """
    saved = _REPLACED if batch.replaces_saved and isinstance(batch.saved, SavedBatch) else batch.saved
    if isinstance(saved, NoBaseline):
        return _without(saved, batch.update_option), saved.comparison
    if batch.device is None or batch.change is None:
        return _other_hardware(saved, batch), "not-comparable"
    return _compared(batch, saved, batch.device, batch.change, max_slowdown)


def judge_figures(batch: MeasuredBatch, max_slowdown: float) -> tuple[Judgement, ...]:
    """Judge each figure that the entry has. Failed if it is slower with confidence, else passed.

    Generations are timed together within seconds, and not between those of another arm. So a doubt is shown, and is no
    verdict of its own. Slower beside other work is inconclusive: 1 of 15 unchanged runs failed at a load of 5 to 10.
    """
    if batch.replaces_saved or batch.why_not_judged or batch.device is None or isinstance(batch.saved, NoBaseline):
        return ()
    judgements = []
    for name, change in batch.figure_changes.items():
        comparison = change.comparison(max_slowdown)
        verdict, remedy = _outcome(comparison, batch) if comparison == "slower" else (Verdict.PASSED, "")
        if comparison == "slower" and (batch.disturbance or change.unrest_log):
            verdict, remedy = Verdict.INCONCLUSIVE, "other work used the machine: run again on an idle one"
        judgement = Judgement(
            gate="baseline",
            verdict=verdict,
            reason=_reason(comparison, change, max_slowdown, FIGURES.get(name, name)),
            evidence=_evidence(batch, batch.saved, batch.device, change),
            remedy=remedy,
        )
        judgements.append(judgement)
    return tuple(judgements)


def _compared(
    batch: MeasuredBatch, saved: SavedBatch, device: DeviceInfo, change: LatencyChange, max_slowdown: float
) -> tuple[Judgement, Comparison]:
    comparison = change.comparison(max_slowdown)
    if batch.disturbance and comparison == "slower" and not batch.why_not_judged:
        comparison = "uncertain"
    verdict, remedy = _outcome(comparison, batch)
    judgement = Judgement(
        gate="baseline",
        verdict=verdict,
        reason=_cause(comparison, saved, batch.receipt) + _reason(comparison, change, max_slowdown),
        evidence=_evidence(batch, saved, device, change),
        remedy=remedy,
    )
    if batch.why_not_judged:
        return not_judged(judgement, "latency", batch.why_not_judged), comparison
    if comparison != "uncertain":
        return judgement, comparison
    if batch.disturbance:
        return replace(judgement, reason=f"{judgement.reason}; {batch.disturbance}", remedy="run again"), comparison
    kernels = _KERNELS_ARE_EXACT if _has_other_kernels(saved, batch.receipt) else ""
    return replace(judgement, remedy=f"{_decision(change, max_slowdown, saved)}{kernels}"), comparison


def _outcome(comparison: Comparison, batch: MeasuredBatch) -> tuple[Verdict, str]:
    update = f"pytest {shlex.quote(batch.test)} --cudagraph {batch.update_option}"
    if comparison == "slower":
        return Verdict.FAILED, f"to accept: {update}"
    if comparison == "uncertain":
        return Verdict.INCONCLUSIVE, "run again"
    return Verdict.PASSED, f"to keep the gain: {update}" if comparison == "faster" else ""


_UNMOVED = 0.005
"""A reference workload that moved less is not shown."""

_KERNELS_ARE_EXACT = "; max_new_kernels gates the kernels, whatever the machine does"


def _decision(change: LatencyChange, max_slowdown: float, baseline: SavedBatch) -> str:
    """What would decide: an idle machine where only other work prevents a verdict, else more sessions."""
    at_rest = replace(change, margin_log=change.margin_log - change.unrest_log, apart_log=0.0)
    if any(each.unrest_log for each in baseline.sessions):
        return (
            "to decide: save the baseline again at its commit, on an idle machine (--cudagraph-update=all), then run "
            "again: it was saved on a busy machine"
        )
    if change.unrest_log and at_rest.comparison(max_slowdown) != "uncertain":
        return "to decide: run again on an idle machine"
    if not change.is_prior:
        return "run again"
    # A session saved with this change would widen the bound or start a new history.
    more = plural(baselines.ENOUGH - change.sessions, "more session")
    where = "of unchanged code (--cudagraph-update at the saved commit, not with this change)"
    return f"to decide: {more} {where}; run again"


def _cause(comparison: Comparison, baseline: SavedBatch, receipt: Receipt | None) -> str:
    """``32 -> 62 kernels: `` before a slowdown, because the count is exact on a busy machine too."""
    is_slower = comparison in ("slower", "uncertain")
    if not is_slower or not _has_other_kernels(baseline, receipt) or receipt is None:
        return ""
    if baseline.kernels == receipt.kernels:
        return "other kernels than saved: "
    return f"{baseline.kernels} -> {receipt.kernels} kernels: "


def _has_other_kernels(baseline: SavedBatch, receipt: Receipt | None) -> bool:
    return receipt is not None and bool(changes_text(baseline.kernel_names, receipt.kernel_names))


def _reason(comparison: Comparison, change: LatencyChange, max_slowdown: float, subject: str = "replay") -> str:
    """The verdict in words, by one statistic. An uncertain one gives the interval first."""
    facts = f"{change.what} {change_text(change.before_ns, change.after_ns)}{_machine(change)}"
    allowed = f"this test allows {percent_text(max_slowdown)}"
    if comparison == "same":
        return f"{subject} is as fast as in the baseline ({facts})"
    if comparison == "faster":
        return f"{subject} is {percent_text(math.expm1(-change.log_ratio))} faster than the baseline ({facts})"
    if comparison == "slower":
        slowdown = percent_text(math.expm1(change.log_ratio))
        return f"{subject} is {slowdown} slower than the baseline ({facts}); {allowed}"
    moved = signed_text(math.exp(change.log_ratio))
    return f"cannot tell whether {subject} is slower than the baseline: {moved} ({facts}); {allowed}"


def _machine(change: LatencyChange) -> str:
    """How much the reference workload moved, by which the latencies are divided. Empty if it did not."""
    if change.reference_ns is None:
        return ""
    before_ns, after_ns = change.reference_ns
    return f", the machine {signed_text(after_ns / before_ns)}" if abs(after_ns / before_ns - 1) > _UNMOVED else ""


def _evidence(batch: MeasuredBatch, saved: SavedBatch, device: DeviceInfo, change: LatencyChange) -> tuple[str, ...]:
    receipt, other_kernels = batch.receipt, _has_other_kernels(saved, batch.receipt)
    # The change may be that of a figure. What moved are the sides of the replay.
    moved = moved_text(batch.timing, saved, batch.change or change, device, other_kernels=other_kernels)
    lines = [moved, interval_basis_text(change)]
    changed = changes_text(saved.kernel_names, receipt.kernel_names) if receipt else ""
    if receipt and changed:
        lines.insert(0, f"the graph itself has changed: {saved.kernels} -> {receipt.kernels} kernels: {changed}")
    return (*lines, *software_changes(saved.device, device))


def interval_basis_text(change: LatencyChange) -> str:
    """``90% interval +4.5 % to +20 %, from 1 saved session (3.0 % between sessions is assumed)``."""
    interval = f"90% interval {span_text(math.exp(change.low_log), math.exp(change.high_log))}"
    basis = "is assumed" if change.is_prior else "was seen"
    sessions = f"{plural(change.sessions, 'saved session')} ({percent_text(change.spread)} between sessions {basis})"
    text = f"{interval}, from {sessions}"
    if change.unrest_log:
        text += f", and {percent_text(math.expm1(change.unrest_log))} for other work on the machine"
    return text


def _without(baseline: NoBaseline, update_option: str) -> Judgement:
    lacks = baseline.asked_for or baseline.comparison == "not-comparable"
    verdict = Verdict.NOT_JUDGED if lacks else Verdict.PASSED
    remedy = "" if baseline.comparison == "off" else f"to save one: pytest --cudagraph {update_option}"
    demand = "; --cudagraph-strict asks for one" if baseline.asked_for else ""
    return Judgement(gate="baseline", verdict=verdict, reason=f"not compared: {baseline.reason}{demand}", remedy=remedy)


def _other_hardware(saved: SavedBatch, batch: MeasuredBatch) -> Judgement:
    changes = saved.device.hardware_changes(batch.device) if batch.device else ()
    return Judgement(
        gate="baseline",
        verdict=Verdict.NOT_JUDGED,
        reason=f"not comparable: the hardware changed since the baseline: {', '.join(changes)}",
        remedy=f"to save one for this device: pytest --cudagraph {batch.update_option}",
    )
