"""Two revisions side by side: the table below the run's own."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from pytest_cudagraph.report.columns import MAX_WIDTH, Column, grid
from pytest_cudagraph.units import latency_text, percent_text
from pytest_cudagraph.values import BaseComparison, BatchReport, GraphReport

_COLUMNS = (
    Column(title="test", right=False),
    Column(title="batch"),
    Column(title="base"),
    Column(title="head"),
    Column(title="change"),
    Column(title="kernels"),
    Column(title="verdict", right=False),
)


def base_table(reports: Iterable[GraphReport], width: int = MAX_WIDTH) -> list[str]:
    """One line per test and batch size that was held against a base, below a line that names it; else no lines."""
    found = [(report, batch, batch.base) for report in reports for batch in report.batches if batch.base is not None]
    lines: list[str] = []
    for revision in dict.fromkeys(base.revision for _, _, base in found):
        rows = [_row(report, batch, base) for report, batch, base in found if base.revision == revision]
        divided = any(base.revision == revision and base.head_reference_ns for _, _, base in found)
        change = "; change: relative to the reference workload" if divided else ""
        lines += [f"replay at {revision} (base) and in the working tree (head), lower quartiles of processes{change}"]
        lines += grid(_COLUMNS, _named_once(rows), width=width)
    return lines


def _named_once(rows: list[list[str]]) -> list[list[str]]:
    return [["" if index and row[0] == rows[index - 1][0] else row[0], *row[1:]] for index, row in enumerate(rows)]


def _row(report: GraphReport, batch: BatchReport, base: BaseComparison) -> list[str]:
    judgement = next((each for each in batch.judgements if each.gate == "base"), None)
    verdict = judgement.verdict.value.replace("-", " ") if judgement else "-"
    if base.change is None:
        return [report.name, str(batch.batch_size), "-", "-", "-", "-", base.missing]
    before_ns, after_ns = statistics.median(base.base_replay_ns), statistics.median(base.head_replay_ns)
    return [
        report.name,
        str(batch.batch_size),
        latency_text(before_ns),
        latency_text(after_ns),
        f"{'+' if base.change.estimate >= 1.0 else '-'}{percent_text(abs(base.change.estimate - 1.0))}",
        _kernels(base.base_kernels, base.head_kernels),
        "slower" if verdict == "failed" else verdict,
    ]


def _kernels(before: int | None, after: int | None) -> str:
    if before is None or after is None:
        return "-"
    return str(after) if before == after else f"{before} -> {after}"
