"""The latency gate: replay's own latency against the saved baseline, with the spread that sessions have."""

from __future__ import annotations

import math

from pytest_cudagraph.gate.wording import SESSION_NOISE_LOG, change_text, moved_text, software_changes
from pytest_cudagraph.units import percent_text
from pytest_cudagraph.values import Comparison, DeviceInfo, Judgement, Latency, NoBaseline, SavedBatch, Timing, Verdict

_LEAST_GAIN = 0.06
"""A gain below two session spreads may be the session; it is not called faster however tight the slowdown gate is."""

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
) -> tuple[Judgement, Comparison]:
    """Failed beyond ``max_slowdown`` and two session spreads, inconclusive in between; hardware must be the same.

    Lower quartile and median must both have moved: the one that moved less decides. Nothing to compare with is no
    failure; the comparison tells it apart (``new``, ``off``). Where speed is not judged the comparison still is made.
    """
    if isinstance(baseline, NoBaseline):
        return _without(baseline), baseline.comparison
    if baseline.device.hardware != device.hardware:
        return _other_hardware(baseline.device, device), "not-comparable"
    what, before_ns, after_ns = _smaller_move(baseline.replay, timing.replay)
    comparison = _compare(math.log(after_ns / before_ns), max_slowdown)
    evidence = (moved_text(timing, baseline), *software_changes(baseline.device, device))
    reason = _reason(comparison, what, before_ns, after_ns, max_slowdown)
    if not judged:
        evidence = (reason, *evidence)
        reason = f"latency is not judged: {why_not}"
        return Judgement(gate="baseline", verdict=Verdict.NOT_JUDGED, reason=reason, evidence=evidence), comparison
    if disturbance and comparison == "slower":
        comparison, reason = "uncertain", f"{reason}; not decided: {disturbance}"
    verdict, remedy = _OUTCOMES[comparison]
    return Judgement(gate="baseline", verdict=verdict, reason=reason, evidence=evidence, remedy=remedy), comparison


_OUTCOMES: dict[Comparison, tuple[Verdict, str]] = {
    "same": (Verdict.PASSED, ""),
    "faster": (Verdict.PASSED, "to keep the gain: --cudagraph-update"),
    "uncertain": (Verdict.INCONCLUSIVE, f"run again; {_ACCEPT}"),
    "slower": (Verdict.FAILED, _ACCEPT),
}


def _smaller_move(saved: Latency, found: Latency) -> tuple[str, float, float]:
    moves = (("median", saved.median_ns, found.median_ns), ("lower quartile", saved.q25_ns, found.q25_ns))
    return min(moves, key=lambda move: abs(math.log(move[2] / move[1])))


def _compare(log_change: float, max_slowdown: float) -> Comparison:
    allowed_log = math.log1p(max_slowdown)
    if log_change > allowed_log + SESSION_NOISE_LOG:
        return "slower"
    if log_change > allowed_log:
        return "uncertain"
    if -log_change > math.log1p(max(max_slowdown, _LEAST_GAIN)):
        return "faster"
    return "same"


def _reason(comparison: Comparison, what: str, before_ns: float, after_ns: float, max_slowdown: float) -> str:
    change = f"{what} {change_text(before_ns, after_ns)}"
    if comparison == "same":
        return f"replay is as fast as in the baseline ({change})"
    if comparison == "faster":
        return f"replay is {percent_text(before_ns / after_ns - 1)} faster than the baseline ({change})"
    slower = f"replay is {percent_text(after_ns / before_ns - 1)} slower than the baseline ({change})"
    allowed = f"{slower}; this test allows {percent_text(max_slowdown)}"
    if comparison == "slower":
        return allowed
    return f"{allowed}, and sessions of one machine may differ by {percent_text(SESSION_NOISE_LOG)}"


def _without(baseline: NoBaseline) -> Judgement:
    verdict = Verdict.NOT_JUDGED if baseline.comparison == "not-comparable" else Verdict.PASSED
    remedy = "" if baseline.comparison == "off" else "to save one: --cudagraph-update"
    return Judgement(gate="baseline", verdict=verdict, reason=f"not compared: {baseline.reason}", remedy=remedy)


def _other_hardware(saved: DeviceInfo, found: DeviceInfo) -> Judgement:
    return Judgement(
        gate="baseline",
        verdict=Verdict.NOT_JUDGED,
        reason=f"not comparable: the baseline is of {saved.name} ({saved.kind}), "
        f"this run is on {found.name} ({found.kind})",
        remedy="to save one for this device: --cudagraph-update",
    )
