"""The speedup gate: eager over replay against the test's minimum."""

from __future__ import annotations

import math
from dataclasses import replace

from pytest_cudagraph.gate.wording import (
    Over,
    attainable_text,
    found_text,
    is_quiet,
    moved_text,
    not_judged,
    timing_text,
)
from pytest_cudagraph.units import factor_text, percent_text, seconds_text
from pytest_cudagraph.values import Interval, Judgement, MeasuredBatch, SavedBatch, Timing, Verdict

_THRESHOLD_ZONE = 0.02
"""An interval within this distance of the target on both sides is at the target. More time cannot decide it."""

_SUGGESTION_STEP = 0.05
"""Suggested minimums are rounded down to this step. Speedups of a CPU-bound model vary by about as much."""


def judge_speedup(batch: MeasuredBatch, min_speedup: float, over: Over = "eager") -> Judgement:
    """Passed or failed as the measurement's evidence against ``min_speedup`` decided, else inconclusive.

    ``over="compiled"`` judges a measurement of the replay against the compiled code. A disturbed device (a throttled or
    shared GPU) makes the verdict inconclusive. With a saved entry of the same hardware the evidence says which side
    changed. Raises :class:`ValueError` if the measurement was taken against another target.
    """
    timing = batch.timing
    judgement = Judgement(
        gate="speedup" if over == "eager" else "over-compiled",
        verdict=Verdict.PASSED,
        reason=f"{found_text(timing, over)}; this test asks for {factor_text(min_speedup)}",
        evidence=_evidence(batch, min_speedup, over),
    )
    if batch.why_not_judged:
        return not_judged(replace(judgement, reason=found_text(timing, over)), "speed", batch.why_not_judged)
    if timing.target_ratio != min_speedup:
        raise ValueError(f"the timing was taken against {timing.target_ratio}, and cannot be judged by {min_speedup}")
    if batch.disturbance:
        reason, remedy = f"{judgement.reason}; not decided: {batch.disturbance}", "run again on a quiet device"
        return replace(judgement, verdict=Verdict.INCONCLUSIVE, reason=reason, remedy=remedy)
    if timing.decision == "pass":
        return judgement
    if timing.decision == "fail":
        return replace(judgement, verdict=Verdict.FAILED, accept=_acceptable(timing))
    # A smaller minimum helps only if the interval reaches below the present one.
    accept = _acceptable(timing) if timing.speedup.low < min_speedup else None
    return _undecided(replace(judgement, verdict=Verdict.INCONCLUSIVE, accept=accept), timing, min_speedup, over)


def _undecided(judgement: Judgement, timing: Timing, min_speedup: float, over: Over) -> Judgement:
    if _at_threshold(timing.speedup, min_speedup):
        reason = f"{found_text(timing, over)}: at the threshold of {factor_text(min_speedup)}"
        return replace(judgement, reason=reason, remedy="more time will not decide it")
    why = _why_open(timing, min_speedup) or f"not decided within {seconds_text(timing.measure_ns)}"
    evidence = judgement.evidence
    if abs(math.log(timing.speedup.estimate / min_speedup)) < math.log1p(timing.detectable_ratio) < math.inf:
        least = percent_text(timing.detectable_ratio)
        evidence = (*evidence, f"a run this long finds a difference of {least} in 80 of 100 cases")
    remedy = "to decide: a larger --cudagraph-time-budget"
    return replace(judgement, reason=f"{judgement.reason}: {why}", evidence=evidence, remedy=remedy)


def _why_open(timing: Timing, min_speedup: float) -> str:
    """Why an interval on one side of the target did not decide. Empty if it contains the target."""
    weighed, speedup = timing.weighed, timing.speedup
    if weighed is None or speedup.low < min_speedup <= speedup.high:
        return ""
    if timing.blocks < weighed.least_blocks:
        spent = seconds_text(timing.measure_ns)
        return f"not decided, a verdict takes {weighed.least_blocks} blocks and {spent} gave {timing.blocks}"
    if 2 * weighed.quiet < timing.blocks:
        disturbed = timing.blocks - weighed.quiet
        return f"not decided, one arm alone was disturbed in {disturbed} of {timing.blocks} blocks, more than half"
    if weighed.quiet < weighed.least_blocks:
        needed = weighed.least_blocks
        return f"not decided, a verdict takes {needed} undisturbed blocks and there are {weighed.quiet}"
    if weighed.elapsed_ns < weighed.least_ns:
        spent, least = seconds_text(weighed.elapsed_ns), seconds_text(weighed.least_ns)
        return f"not decided, a verdict takes {least} of samples and there are {spent}"
    return "not decided, a verdict takes more evidence than a 95% interval (99 % to pass, 99.9 % to fail)"


def _at_threshold(speedup: Interval, min_speedup: float) -> bool:
    lowest, highest = min_speedup * (1 - _THRESHOLD_ZONE), min_speedup * (1 + _THRESHOLD_ZONE)
    return lowest <= speedup.low and speedup.high <= highest


def _evidence(batch: MeasuredBatch, min_speedup: float, over: Over) -> tuple[str, ...]:
    timing, kernels = batch.timing, batch.receipt.kernels if batch.receipt else None
    lines = [timing_text(timing, batch.device, over)]
    if over == "compiled":
        return (*lines, *timing.notes)
    attainable = attainable_text(timing, min_speedup, kernels)
    lines += [attainable] if attainable else []
    saved, change = batch.saved, batch.change
    if isinstance(saved, SavedBatch) and change is not None and not batch.replaces_saved:
        other_kernels = None not in (kernels, saved.kernels) and kernels != saved.kernels
        lines.append(moved_text(timing, saved, change, batch.device, other_kernels=other_kernels))
    return (*lines, *timing.notes)


def _acceptable(timing: Timing) -> float | None:
    """The largest rounded minimum below the interval. None on a noisy machine, or if it is not above 0."""
    if not is_quiet(timing):
        return None
    steps = math.floor(timing.speedup.low / _SUGGESTION_STEP + 1e-9)
    return round(steps * _SUGGESTION_STEP, 2) if steps >= 1 else None
