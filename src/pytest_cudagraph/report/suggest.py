"""The marker that a test could carry: what it measured, less what another session may find."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from pytest_cudagraph.report.accepting import min_line
from pytest_cudagraph.report.table import UNTIMED
from pytest_cudagraph.values import BatchReport, GraphReport, Timing

_ROOM = 0.03
"""Speedups of a CPU-bound eager arm wander by this much between sessions (docs/statistics.md)."""

_STEP = 0.05


def suggestions(reports: Iterable[GraphReport]) -> list[str]:
    """``suggest: test_a.py::test_a: @pytest.mark.graph_speedup(min={1: 1.85, 8: 1.2})``, or why there is none.

    The least speedup of each batch size is the lower bound of its 95 % interval, less the noise between blocks or the
    room that sessions need, whichever is more, rounded down to 0.05.
    """
    found = {report.name: _why_not(report) or _suggestion(report) for report in reports}
    return [f"suggest: {name}: {text}" for name, text in found.items()]


def _suggestion(report: GraphReport) -> str:
    found = {batch.batch_size: _least_speedup(batch.timing) for batch in report.batches if batch.timing}
    least = {size: value for size, value in found.items() if value > 0}
    # In place of whatever marker it has: only an argument would override it.
    source = replace(report.min_source, place="setting") if report.min_source.place == "marker" else report.min_source
    return min_line(least, source) if least else "no speedup was measured"


def _least_speedup(timing: Timing) -> float:
    noise = max(timing.noise_ratio, _ROOM)
    return math.floor(timing.speedup.low * (1 - noise) / _STEP + 1e-9) * _STEP


def _why_not(report: GraphReport) -> str:
    if report.verdict in UNTIMED or not report.batches:
        return f"nothing, for it is {report.verdict.value.replace('-', ' ')}"
    return next((reason for batch in report.batches if (reason := _unjudged(batch))), "")


def _unjudged(batch: BatchReport) -> str:
    judgement = next((each for each in batch.judgements if each.gate == "speedup"), None)
    if judgement is None:
        return "nothing, for it was not measured"
    return f"nothing, for {judgement.reason}" if judgement.verdict.value == "not-judged" else ""
