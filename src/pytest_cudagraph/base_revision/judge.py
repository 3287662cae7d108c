"""The gate against another revision, and its table in the summary."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from pytest_cudagraph.gate.wording import change_text
from pytest_cudagraph.units import latency_text, percent_text, plural, signed_text, span_text
from pytest_cudagraph.values import (
    BaseComparison,
    BatchReport,
    Column,
    GraphReport,
    Interval,
    Judgement,
    Table,
    Verdict,
)

LOOKS = (5, 10)
"""The numbers of process pairs after which the comparison is judged. The last look is final.

Ten processes are the least for a measurement across processes (docs/statistics.md). If they do not decide, there are
more.
"""

_T_QUANTILES = {4: 4.604, 9: 3.250}
"""Student's t at 0.995 by degrees of freedom, one less than the pairs of a look (scipy.stats.t.ppf(0.995, df)).

Two looks with 0.5 % per side. By Bonferroni at most 1 % of unchanged tests fail, and at most 1 % of tests that are
just too slow pass, if the log-ratios of the pairs are normal.
"""

_UNMOVED = 0.02
"""Smaller changes of the eager side are reported as no change."""


def base_change(base: BaseComparison) -> Interval | None:
    """Head's replay over base's, with the 99 % interval of the mean log-ratio over pairs. None without enough pairs.

    Each replay is divided by the reference workload of its own process, if there is one, because a slow machine slows
    both. Student's t is over processes: the layout of a process adds noise that more calls do not average out.
    """
    logs = _log_ratios(base.head_replay_ns, base.base_replay_ns)
    if base.head_reference_ns:
        references = _log_ratios(base.head_reference_ns, base.base_reference_ns)
        logs = [log - reference for log, reference in zip(logs, references, strict=True)]
    quantile = _T_QUANTILES.get(len(logs) - 1)
    if quantile is None:
        return None
    mean, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    return Interval(
        estimate=math.exp(mean), low=math.exp(mean - quantile * error), high=math.exp(mean + quantile * error)
    )


def judge_base(base: BaseComparison, max_slowdown: float, why_not_judged: str = "") -> Judgement:
    """Failed when the whole interval is above ``max_slowdown``, passed when it is below, else inconclusive.

    A test that the base does not have passes.
    """
    change = base.change
    if change is None:
        verdict = Verdict.PASSED if base.missing.startswith("new") else Verdict.NOT_JUDGED
        reason = f"not compared with {base.revision}: {base.missing}{': ' if base.why else ''}{base.why}"
        return Judgement(gate="base", verdict=verdict, reason=reason)
    reason = f"replay is {_change_text(change, base)}; allowed is {percent_text(max_slowdown)}"
    evidence = _evidence(base)
    if why_not_judged:
        evidence = (reason, *evidence)
        reason = f"latency is not judged: {why_not_judged}"
        return Judgement(gate="base", verdict=Verdict.NOT_JUDGED, reason=reason, evidence=evidence)
    allowed_ratio = 1.0 + max_slowdown
    verdict = Verdict.PASSED if change.high <= allowed_ratio else Verdict.INCONCLUSIVE
    verdict = Verdict.FAILED if change.low > allowed_ratio else verdict
    remedy = "run again on a quieter machine" if verdict is Verdict.INCONCLUSIVE else ""
    # The upper bound, rounded up: with the estimate the next run would be inconclusive. The option takes at most 1.
    allowed = math.ceil((change.high - 1.0) * 100) / 100
    accept = (allowed if allowed <= 1.0 else math.inf) if verdict is Verdict.FAILED else None
    return Judgement(gate="base", verdict=verdict, reason=reason, evidence=evidence, remedy=remedy, accept=accept)


def _change_text(change: Interval, base: BaseComparison) -> str:
    """``10 % slower than in HEAD~1 (a1b2c3d), 99% interval +8.9 % to +12 %``."""
    relative = " relative to the reference workload" if base.head_reference_ns else ""
    direction = "slower" if change.estimate >= 1.0 else "faster"
    size = percent_text(abs(change.estimate - 1.0))
    interval = f"99% interval {span_text(change.low, change.high)}"
    return f"{size} {direction} than in {base.revision}{relative}, {interval}"


def _evidence(base: BaseComparison) -> tuple[str, ...]:
    pairs = plural(len(base.head_replay_ns), "pair")
    replay = f"base -> head: replay {change_text(*_levels_ns(base))}, lower quartiles in {pairs} of processes, in turn"
    return tuple(filter(None, (replay, _eager_text(base), _reference_text(base), _kernels_text(base))))


def _levels_ns(base: BaseComparison) -> tuple[float, float]:
    """Base and head, of which the quotient is the change: the head as fast as the machine was for the base."""
    base_ns = statistics.geometric_mean(base.base_replay_ns)
    return base_ns, base_ns * (base.change.estimate if base.change else 1.0)


def _reference_text(base: BaseComparison) -> str:
    if not base.head_reference_ns:
        return "not divided by a reference workload"
    change = change_text(statistics.median(base.base_reference_ns), statistics.median(base.head_reference_ns))
    return f"divided by the reference workload of each process ({change})"


def _eager_text(base: BaseComparison) -> str:
    logs = _log_ratios(base.head_eager_ns, base.base_eager_ns)
    if not logs:
        return ""
    change = change_text(statistics.median(base.base_eager_ns), statistics.median(base.head_eager_ns))
    ratio = math.exp(statistics.fmean(logs))
    if abs(ratio - 1.0) < _UNMOVED:
        return f"eager did not change ({change})"
    return f"eager got {percent_text(abs(ratio - 1.0))} {'slower' if ratio > 1.0 else 'faster'} ({change})"


def _kernels_text(base: BaseComparison) -> str:
    before, after = base.base_kernels, base.head_kernels
    if before is None or after is None:
        return ""
    return f"{plural(after, 'kernel')} in both" if before == after else f"{before} -> {plural(after, 'kernel')}"


def _log_ratios(head_ns: Sequence[float], base_ns: Sequence[float]) -> list[float]:
    return [math.log(head / base) for head, base in zip(head_ns, base_ns, strict=True)]


_COLUMNS = tuple(
    Column(title=title, right=title not in ("test", "verdict"))
    for title in ("test", "batch", "base", "head", "change", "99 % interval", "kernels", "verdict")
)


def base_tables(reports: Iterable[GraphReport]) -> list[Table]:
    """A table for each base, with a row per compared test and batch size. Empty without a comparison."""
    compared = [(report, batch, batch.base) for report in reports for batch in report.batches if batch.base is not None]
    revisions = dict.fromkeys(base.revision for _, _, base in compared)
    return [_table(revision, [each for each in compared if each[2].revision == revision]) for revision in revisions]


def _table(revision: str, compared: Sequence[tuple[GraphReport, BatchReport, BaseComparison]]) -> Table:
    divided = any(base.head_reference_ns for _, _, base in compared)
    return Table(
        title=f"replay at {revision} (base) and in the working tree (head)",
        columns=_COLUMNS,
        rows=tuple(_row(*each) for each in compared),
        remarks=tuple((base.missing,) if base.change is None else () for _, _, base in compared),
        note=f"lower quartiles of processes{'; head as fast as the reference workload was for base' * divided}",
    )


def _row(report: GraphReport, batch: BatchReport, base: BaseComparison) -> tuple[str, ...]:
    judgement = batch.judged_by("base")
    verdict = judgement.verdict.words if judgement else "-"
    if base.change is None:
        return (report.name, str(batch.batch_size), *"-----", verdict)
    before_ns, after_ns = _levels_ns(base)
    return (
        report.name,
        str(batch.batch_size),
        latency_text(before_ns),
        latency_text(after_ns),
        signed_text(base.change.estimate),
        span_text(base.change.low, base.change.high),
        _kernels(base.base_kernels, base.head_kernels),
        "slower" if verdict == "failed" else verdict,
    )


def _kernels(before: int | None, after: int | None) -> str:
    if before is None or after is None:
        return "-"
    return str(after) if before == after else f"{before} -> {after}"
