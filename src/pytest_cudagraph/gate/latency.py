"""The latency gate: replay's own latency against the sessions that the baseline saved of it."""

from __future__ import annotations

import math

from pytest_cudagraph import baseline as baselines
from pytest_cudagraph.baseline import Change
from pytest_cudagraph.gate.structure import changes_text
from pytest_cudagraph.gate.wording import change_text, moved_text, signed_text, software_changes
from pytest_cudagraph.units import percent_text, plural
from pytest_cudagraph.values import Comparison, DeviceInfo, Judgement, NoBaseline, Receipt, SavedBatch, Timing, Verdict

_ACCEPT = "to accept: --cudagraph-update"


def judge_baseline(
    timing: Timing,
    baseline: SavedBatch | NoBaseline,
    max_slowdown: float,
    device: DeviceInfo,
    *,
    judged: bool,
    why_not: str = "",
    disturbance: str = "",
    receipt: Receipt | None = None,
) -> tuple[Judgement, Comparison]:
    """Failed when the slowdown is above ``max_slowdown`` with confidence, passed when it is not, else inconclusive.

    With confidence: by the prediction interval over the saved sessions (:func:`pytest_cudagraph.baseline.change`).
    Hardware must be the same. Nothing to compare with is no failure; the comparison tells it apart (``new``, ``off``).
    Where speed is not judged the comparison still is made. ``receipt`` lets the evidence name new kernels.
    """
    if isinstance(baseline, NoBaseline):
        return _without(baseline), baseline.comparison
    other = baseline.device.hardware_changes(device)
    if other:
        return _other_hardware(other), "not-comparable"
    change = baselines.change(baseline, baselines.session_of(timing, device))
    comparison = change.comparison(max_slowdown)
    evidence = _evidence(timing, baseline, device, change, receipt)
    reason = _reason(comparison, change, max_slowdown)
    if not judged:
        evidence = (reason, *evidence)
        reason = f"latency is not judged: {why_not}"
        return Judgement(gate="baseline", verdict=Verdict.NOT_JUDGED, reason=reason, evidence=evidence), comparison
    if disturbance and comparison == "slower":
        comparison, reason = "uncertain", f"{reason}; not decided: {disturbance}"
    verdict, remedy = _OUTCOMES[comparison]
    if comparison == "uncertain" and change.is_prior and not disturbance:
        remedy = f"to decide: {_more_sessions(change)}; {remedy}"
    return Judgement(gate="baseline", verdict=verdict, reason=reason, evidence=evidence, remedy=remedy), comparison


_OUTCOMES: dict[Comparison, tuple[Verdict, str]] = {
    "same": (Verdict.PASSED, ""),
    "faster": (Verdict.PASSED, "to keep the gain: --cudagraph-update"),
    "uncertain": (Verdict.INCONCLUSIVE, f"run again; {_ACCEPT}"),
    "slower": (Verdict.FAILED, _ACCEPT),
}


def _more_sessions(change: Change) -> str:
    return f"save {baselines.ENOUGH - change.sessions} more sessions (--cudagraph-update where it passes)"


def _reason(comparison: Comparison, change: Change, max_slowdown: float) -> str:
    found = f"{change.what} {change_text(change.before_ns, change.after_ns)}"
    size = percent_text(abs(math.expm1(change.log_ratio)))
    if comparison == "same":
        return f"replay is as fast as in the baseline ({found})"
    if comparison == "faster":
        gain = percent_text(math.expm1(-change.log_ratio))
        return f"replay is {gain} faster than the baseline ({found})"
    low, high = (change.log_ratio + side * change.margin_log for side in (-1, 1))
    interval = f"90% interval {signed_text(math.exp(low))} to {signed_text(math.exp(high))}"
    direction = "slower" if change.log_ratio > 0 else "faster"
    allowed = f"this test allows {percent_text(max_slowdown)}"
    return f"replay is {size} {direction} than the baseline ({found}; {interval}); {allowed}"


def _evidence(
    timing: Timing, baseline: SavedBatch, device: DeviceInfo, change: Change, receipt: Receipt | None
) -> tuple[str, ...]:
    lines = [moved_text(timing, baseline, device, change.reference_ns), _sessions_text(change)]
    changed = changes_text(baseline.kernel_names, receipt.kernel_names) if receipt else ""
    if receipt and changed:
        lines.insert(0, f"the graph itself has changed: {baseline.kernels} -> {receipt.kernels} kernels: {changed}")
    return (*lines, *software_changes(baseline.device, device))


def _sessions_text(change: Change) -> str:
    """What the interval is made of, so that a reader can work it out again."""
    spread = f"{percent_text(change.spread)} between sessions {'assumed' if change.is_prior else 'seen'}"
    text = f"compared with {plural(change.sessions, 'saved session')}, {spread}"
    if change.unrest_log:
        text += f" and {percent_text(math.expm1(change.unrest_log))} more for other work on the machine"
    if change.reference_ns is None:
        return f"{text}; not divided by a reference workload"
    return f"{text}; divided by the reference workload ({change_text(*change.reference_ns)})"


def _without(baseline: NoBaseline) -> Judgement:
    verdict = Verdict.NOT_JUDGED if baseline.comparison == "not-comparable" else Verdict.PASSED
    remedy = "" if baseline.comparison == "off" else "to save one: --cudagraph-update"
    return Judgement(gate="baseline", verdict=verdict, reason=f"not compared: {baseline.reason}", remedy=remedy)


def _other_hardware(changes: tuple[str, ...]) -> Judgement:
    return Judgement(
        gate="baseline",
        verdict=Verdict.NOT_JUDGED,
        reason=f"not comparable: since the baseline the hardware is another: {', '.join(changes)}",
        remedy="to save one for this device: --cudagraph-update",
    )
