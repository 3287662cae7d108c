"""The latency gate: a replay's latency against the sessions in the baseline."""

from __future__ import annotations

import math
from dataclasses import replace

from pytest_cudagraph import baseline as baselines
from pytest_cudagraph.gate.structure import changes_text
from pytest_cudagraph.gate.wording import change_text, moved_text, software_changes
from pytest_cudagraph.units import percent_text, plural, signed_text
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

_ACCEPT = "to accept: --cudagraph-update"

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


FIGURES = {"ttft": "TTFT", "itl": "ITL", "time_per_token": "time per token"}


def judge_figures(batch: MeasuredBatch, max_slowdown: float) -> tuple[Judgement, ...]:
    """Judge each figure that the entry has. Failed if it is slower with confidence, else passed.

    Generations are timed together within seconds, and not between those of another arm. So a doubt is shown, and is no
    verdict of its own. Slower beside other work is inconclusive: 1 of 15 unchanged runs failed at a load of 5 to 10.
    """
    if batch.replaces_saved or batch.why_not_judged or batch.device is None or isinstance(batch.saved, NoBaseline):
        return ()
    found = []
    for name, change in batch.figure_changes.items():
        comparison = change.comparison(max_slowdown)
        verdict, remedy = _OUTCOMES[comparison] if comparison == "slower" else (Verdict.PASSED, "")
        if comparison == "slower" and (batch.disturbance or change.unrest_log):
            verdict, remedy = Verdict.INCONCLUSIVE, f"other work used the machine: run again on an idle one; {_ACCEPT}"
        judgement = Judgement(
            gate="baseline",
            verdict=verdict,
            reason=_reason(comparison, change, max_slowdown, FIGURES.get(name, name)),
            evidence=_evidence(batch, batch.saved, batch.device, change),
            remedy=remedy,
        )
        found.append(judgement)
    return tuple(found)


def _compared(
    batch: MeasuredBatch, saved: SavedBatch, device: DeviceInfo, change: LatencyChange, max_slowdown: float
) -> tuple[Judgement, Comparison]:
    comparison = change.comparison(max_slowdown)
    evidence = _evidence(batch, saved, device, change)
    reason = _cause(comparison, saved, batch.receipt) + _reason(comparison, change, max_slowdown)
    if batch.why_not_judged:
        evidence = (reason, *evidence)
        reason = f"latency is not judged: {batch.why_not_judged}"
        return Judgement(gate="baseline", verdict=Verdict.NOT_JUDGED, reason=reason, evidence=evidence), comparison
    if batch.disturbance and comparison == "slower":
        comparison, reason = "uncertain", f"{reason}; not decided: {batch.disturbance}"
    verdict, remedy = _OUTCOMES[comparison]
    if comparison == "uncertain" and not batch.disturbance:
        kernels = _KERNELS_ARE_EXACT if _has_other_kernels(saved, batch.receipt) else ""
        remedy = f"{_decision(change, max_slowdown, saved)}{kernels}; {_ACCEPT}"
    return Judgement(gate="baseline", verdict=verdict, reason=reason, evidence=evidence, remedy=remedy), comparison


_OUTCOMES: dict[Comparison, tuple[Verdict, str]] = {
    "same": (Verdict.PASSED, ""),
    "faster": (Verdict.PASSED, "to keep the gain: --cudagraph-update"),
    "uncertain": (Verdict.INCONCLUSIVE, f"run again; {_ACCEPT}"),
    "slower": (Verdict.FAILED, _ACCEPT),
}


_KERNELS_ARE_EXACT = "; max_new_kernels gates the kernels, whatever the machine does"


def _decision(change: LatencyChange, max_slowdown: float, baseline: SavedBatch) -> str:
    """What would decide: an idle machine where only other work prevents a verdict, else more sessions."""
    at_rest = replace(change, margin_log=change.margin_log - change.unrest_log, apart_log=0.0)
    if any(each.unrest_log for each in baseline.sessions):
        return (
            "to decide: the baseline was saved on a busy machine: save it again at its commit on an idle machine "
            "(--cudagraph-update=all), then run again"
        )
    if change.unrest_log and at_rest.comparison(max_slowdown) != "uncertain":
        return "to decide: run again on an idle machine"
    return f"to decide: {_more_sessions(change)}; run again" if change.is_prior else "run again"


def _more_sessions(change: LatencyChange) -> str:
    # A session saved with this change would widen the bound or start a new history.
    more = plural(baselines.ENOUGH - change.sessions, "more session")
    return f"{more} of unchanged code (--cudagraph-update at the commit that is saved, and not with this change)"


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
    found = f"{change.what} {change_text(change.before_ns, change.after_ns)}"
    relative = ""
    if change.reference_ns is not None:
        relative = " relative to the reference workload"
        found += f", reference workload {change_text(*change.reference_ns)}"
    size = percent_text(abs(math.expm1(change.log_ratio)))
    if comparison == "same":
        return f"{subject} is as fast as in the baseline{relative} ({found})"
    if comparison == "faster":
        gain = percent_text(math.expm1(-change.log_ratio))
        return f"{subject} is {gain} faster than the baseline{relative} ({found})"
    interval = change_interval_text(change)
    direction = "slower" if change.log_ratio > 0 else "faster"
    allowed = f"this test allows {percent_text(max_slowdown)}"
    return f"{subject} is {size} {direction} than the baseline{relative} ({found}; {interval}); {allowed}"


def change_interval_text(change: LatencyChange) -> str:
    """``90% interval +4.5 % to +20 %``."""
    low, high = math.exp(change.log_ratio - change.margin_log), math.exp(change.high_log)
    return f"90% interval {signed_text(low)} to {signed_text(high)}"


def _evidence(batch: MeasuredBatch, saved: SavedBatch, device: DeviceInfo, change: LatencyChange) -> tuple[str, ...]:
    receipt, other_kernels = batch.receipt, _has_other_kernels(saved, batch.receipt)
    moved = moved_text(batch.timing, saved, device, change.reference_ns, other_kernels=other_kernels)
    lines = [moved, sessions_text(change)]
    changed = changes_text(saved.kernel_names, receipt.kernel_names) if receipt else ""
    if receipt and changed:
        lines.insert(0, f"the graph itself has changed: {saved.kernels} -> {receipt.kernels} kernels: {changed}")
    return (*lines, *software_changes(saved.device, device))


def sessions_text(change: LatencyChange) -> str:
    """What the interval is computed from, so that a reader can compute it again."""
    spread = f"{percent_text(change.spread)} between sessions {'assumed' if change.is_prior else 'seen'}"
    text = f"compared with {plural(change.sessions, 'saved session')}, {spread}"
    if change.unrest_log:
        text += f" and {percent_text(math.expm1(change.unrest_log))} more for other work on the machine"
    if change.apart_log:
        more = signed_text(math.exp(change.log_ratio + change.apart_log))
        return f"{text}; as they are: divided by the reference workload, which other work disturbed, it is {more}"
    if change.reference_ns is None:
        return f"{text}; not divided by a reference workload"
    return f"{text}; each divided by its own reference workload"


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


_ALIKE_LOG = 0.005
"""With a smaller difference, the change is shown without the reference workload."""


def replaced_text(saved: SavedBatch, new: SavedBatch) -> str:
    """``replay 56.7 -> 243.9 µs (+330 %), 32 -> 62 kernels``. Empty if neither changed, as after an upgrade.

    A latency has changed if it does not continue the saved history (:func:`pytest_cudagraph.baseline.is_continued`).
    """
    hardware = saved.device.hardware_changes(new.device)
    if hardware:
        return f"other hardware: {', '.join(hardware)}"
    change = baselines.change(saved, new.sessions[-1])
    kernels = _kernels_text(saved, new)
    alike = {name: getattr(saved, name) for name in ("kernels", "kernel_names", "device", "compiled")}
    has_moved = not baselines.is_continued(saved, replace(new, **alike))
    texts = [f"{_latency_text(change)}{kernels}"] if has_moved or kernels else []
    texts += [
        _latency_text(each, FIGURES.get(name, name)) for name, each in baselines.moved_figures(saved, new).items()
    ]
    return ", ".join(texts)


def _latency_text(change: LatencyChange, subject: str = "replay") -> str:
    raw = change.after_ns / change.before_ns
    moved = signed_text(raw)
    if abs(math.log(raw) - change.log_ratio) > _ALIKE_LOG:
        moved += f"; {signed_text(math.exp(change.log_ratio))} relative to the reference workload"
    # Tables show medians. Another statistic is named, because the two may differ.
    named = "" if change.what == "median" else f"{change.what} "
    return f"{subject} {named}{change_text(change.before_ns, change.after_ns)} ({moved})"


def _kernels_text(saved: SavedBatch, new: SavedBatch) -> str:
    if saved.kernels is None or new.kernels is None:
        return ""
    if saved.kernels != new.kernels:
        return f", {saved.kernels} -> {plural(new.kernels, 'kernel')}"
    changed = changes_text(saved.kernel_names, new.kernel_names)
    return f", other kernels: {changed}" if changed else ""
