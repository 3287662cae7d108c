"""The marker that a test could carry: what it measured, less what another session may find."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

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
    least: dict[str, dict[int, float]] = {}
    why_not: dict[str, str] = {}
    for report in reports:
        found = {batch.batch_size: _least_speedup(batch.timing) for batch in report.batches if batch.timing}
        least[report.name] = {size: value for size, value in found.items() if value > 0}
        why_not[report.name] = _why_not(report)
    return [
        f"suggest: {name}: {why_not[name] or _marker(values) or 'no speedup was measured'}"
        for name, values in least.items()
    ]


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


def _marker(least: Mapping[int, float]) -> str:
    if not least:
        return ""
    values = {size: f"{value:.2f}" for size, value in sorted(least.items())}
    each = ", ".join(f"{size}: {value}" for size, value in values.items())
    argument = values[min(values)] if len(set(values.values())) == 1 else f"{{{each}}}"
    return f"@pytest.mark.graph_speedup(min={argument})"
