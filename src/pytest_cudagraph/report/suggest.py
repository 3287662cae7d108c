"""The marker that a test could carry: what it measured, less what another session may find."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from pytest_cudagraph.report.accepting import min_line
from pytest_cudagraph.report.table import UNTIMED
from pytest_cudagraph.units import factor_text
from pytest_cudagraph.values import BatchReport, GraphReport, Judgement, Timing, Verdict

_ROOM = 0.03
"""Speedups of a CPU-bound eager arm wander by this much between sessions (docs/statistics.md)."""

_STEP = 0.05


def suggestions(reports: Iterable[GraphReport]) -> list[str]:
    """``suggest: test_a.py::test_a: @pytest.mark.graph_speedup(min={1: 1.85, 8: 1.2})``, or why there is none.

    The least speedup of each batch size is the lower bound of its 95 % interval, less the noise between blocks or the
    room that sessions need, whichever is more, rounded down to 0.05. Without evidence for each of its batch sizes a
    test gets none: one number would hold for all of them, and what a mapping leaves out is no longer measured.
    """
    found = {report.name: _why_not(report) or _suggestion(report) for report in reports}
    return [f"suggest: {name}: {text}" for name, text in found.items()]


def _suggestion(report: GraphReport) -> str:
    least = {batch.batch_size: _least_speedup(batch.timing) for batch in report.batches if batch.timing}
    # In place of whatever marker it has: only an argument would override it.
    source = replace(report.min_source, place="setting") if report.min_source.place == "marker" else report.min_source
    return min_line(least, source)


def _least_speedup(timing: Timing) -> float:
    noise = max(timing.noise_ratio, _ROOM)
    # The lower bound of what is noise alone is 0 times infinity.
    left = timing.speedup.low * (1 - noise) if math.isfinite(noise) else 0.0
    return math.floor(left / _STEP + 1e-9) * _STEP


def _why_not(report: GraphReport) -> str:
    if report.verdict in UNTIMED or not report.batches:
        return f"nothing, for it is {report.verdict.value.replace('-', ' ')}"
    return next((reason for batch in report.batches if (reason := _unjudged(batch))), "") or _unproven(report)


def _unjudged(batch: BatchReport) -> str:
    judgement = _judgement(batch)
    if judgement is None or batch.timing is None:
        return "nothing, for it was not measured"
    return f"nothing, for {judgement.reason}" if judgement.verdict.value == "not-judged" else ""


def _judgement(batch: BatchReport) -> Judgement | None:
    return next((each for each in batch.judgements if each.gate == "speedup"), None)


def _unproven(report: GraphReport) -> str:
    sizes: dict[str, list[str]] = {}
    for batch in report.batches:
        reason = _no_evidence(batch)
        if reason:
            sizes.setdefault(reason, []).append(str(batch.batch_size))
    found = [f"batch {', '.join(found)}: {reason}" for reason, found in sizes.items()]
    return f"nothing, for {'; '.join(found)}" if found else ""


def _no_evidence(batch: BatchReport) -> str:
    timing, judgement = batch.timing, _judgement(batch)
    if timing is None or judgement is None:
        return ""
    if timing.speedup.low <= 0:
        return "too few blocks for a lower bound; give a larger --cudagraph-time-budget"
    if judgement.verdict is Verdict.INCONCLUSIVE and timing.decision != "open":
        # The evidence had decided, and something on the device spoke against it.
        return judgement.reason
    if _least_speedup(timing) <= 0:
        return f"the lower bound of its speedup, less the noise, is below {factor_text(_STEP)}"
    return ""
