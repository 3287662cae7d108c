"""The message of a failing test with the setting that would accept it, and the suggested markers."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from pytest_cudagraph.report.table import UNTIMED, device_text
from pytest_cudagraph.units import factor_text
from pytest_cudagraph.values import BatchReport, GraphReport, Judgement, MinSource, Timing, Verdict


def accept_hints(report: GraphReport, missed: Sequence[Judgement]) -> list[str]:
    """``to accept: @pytest.mark.graph_speedup(min={1: 1.85, 8: 1.20})``, and the like for kernels and another revision.

    One line per setting, because a second marker for the same key has no effect. There is none for a gate that some
    batch size cannot pass by any setting.
    """
    lines = [_speedup_line(report)] if any(each.gate == "speedup" for each in missed) else []
    kernels = _largest(missed, "structure")
    if kernels is not None:
        marker = f"@pytest.mark.graph_speedup(max_new_kernels={kernels:g})"
        update = f"pytest {shlex.quote(report.nodeid)} --cudagraph {report.update_option}"
        lines.append(f"to accept: {marker}, or {update}")
    over_compiled = min((each.accept or 0.0 for each in missed if each.gate == "over-compiled"), default=0.0)
    if over_compiled:
        lines.append(f"to accept: @pytest.mark.graph_speedup(min_over_compiled={over_compiled:.2f})")
    slowdown = _largest(missed, "base")
    if slowdown is not None:
        lines.append(f"to accept: --cudagraph-base-slowdown={slowdown:.2f}")
    return [line for line in lines if line]


def _largest(missed: Iterable[Judgement], gate: str) -> float | None:
    return max((each.accept for each in missed if each.gate == gate and each.accept is not None), default=None)


def _speedup_line(report: GraphReport) -> str:
    """With every batch size, because a size missing from a mapping would no longer be measured."""
    least: dict[int, float] = {}
    accepted: list[float] = []
    for batch in report.batches:
        judgement = batch.judged_by("speedup")
        accept = judgement.accept if judgement else None
        if judgement is not None and judgement.verdict is Verdict.FAILED and accept is None:
            return ""
        accepted += [] if accept is None else [accept]
        value = batch.min_speedup if accept is None else accept
        least |= {} if value is None else {batch.batch_size: value}
    return f"to accept: {min_line(least, report.min_source)}" if accepted else ""


def min_line(least: Mapping[int, float], source: MinSource) -> str:
    """What to write to set these minimums, at the place that ``source`` names."""
    argument = _min_text(least, source)
    if source.place == "argument":
        return f"min_speedup={argument} in the call: its argument overrides markers"
    marker = f"@pytest.mark.{source.marker}={argument})"
    return f"{marker} in place of the marker that asks for more" if source.place == "marker" else marker


def _min_text(least: Mapping[int, float], source: MinSource) -> str:
    values = {size: _number_text(value) for size, value in sorted(least.items())}
    if len(set(values.values())) == 1 and not source.is_mapping:
        return next(iter(values.values()))
    return f"{{{', '.join(f'{size}: {value}' for size, value in values.items())}}}"


def _number_text(value: float) -> str:
    """Two decimals, or more if the value has them, so that no minimum becomes stricter."""
    text = f"{value:.2f}"
    return text if abs(float(text) - value) < 1e-9 else f"{value:g}"


_ROOM = 0.03
"""Speedups of a CPU-bound model vary by this much between sessions (docs/statistics.md)."""

_STEP = 0.05


def suggestions(reports: Iterable[GraphReport]) -> list[str]:
    """``suggest: test_a.py::test_a: @pytest.mark.graph_speedup(min={1: 1.85, 8: 1.2})``, or why there is none.

    The least speedup of each batch size is the lower bound of its 95 % interval, less the noise between blocks or the
    variation between sessions, whichever is larger, rounded down to 0.05. A test without evidence for each of its
    batch sizes gets none, because a marker decides on all of them.
    """
    texts = {report.name: _why_not(report) or _suggestion(report) for report in reports}
    return [f"suggest: {name}: {text}" for name, text in texts.items()]


def _suggestion(report: GraphReport) -> str:
    least = {batch.batch_size: _least_speedup(batch.timing) for batch in report.batches if batch.timing}
    # It replaces an existing marker. Only an argument overrides it.
    source = replace(report.min_source, place="setting") if report.min_source.place == "marker" else report.min_source
    return min_line(least, source)


def _least_speedup(timing: Timing) -> float:
    noise = max(timing.noise_ratio, _ROOM)
    # With infinite noise the bound would be 0 times infinity.
    left = timing.speedup.low * (1 - noise) if math.isfinite(noise) else 0.0
    return math.floor(left / _STEP + 1e-9) * _STEP


def _why_not(report: GraphReport) -> str:
    if report.verdict in UNTIMED or not report.batches:
        return f"nothing, for it is {report.verdict.words}"
    for batch in report.batches:
        judgement = batch.judged_by("speedup")
        if judgement is None or batch.timing is None:
            return "nothing, for it was not measured"
        if judgement.verdict is Verdict.NOT_JUDGED:
            return f"nothing, for {judgement.reason}"
    return _unproven(report)


def _unproven(report: GraphReport) -> str:
    sizes: dict[str, list[str]] = {}
    for batch in report.batches:
        reason = _no_evidence(batch)
        if reason:
            sizes.setdefault(reason, []).append(str(batch.batch_size))
    told = [f"batch {', '.join(named)}: {reason}" for reason, named in sizes.items()]
    return f"nothing, for {'; '.join(told)}" if told else ""


def _no_evidence(batch: BatchReport) -> str:
    timing, judgement = batch.timing, batch.judged_by("speedup")
    if timing is None or judgement is None:
        return ""
    if timing.speedup.low <= 0:
        return "too few blocks for a lower bound; give a larger --cudagraph-time-budget"
    if judgement.verdict is Verdict.INCONCLUSIVE and timing.decision != "open":
        # The evidence decided, but the device was disturbed.
        return judgement.reason
    if _least_speedup(timing) <= 0:
        return f"the lower bound of its speedup, less the noise, is below {factor_text(_STEP)}"
    return ""


_SHOWN = 4
"""Batch sizes shown in full. With evidence they fill a screen."""

_EXPLAINED = 3
"""Hazards named in the last line."""

_INDENT = "  "


def failure_text(report: GraphReport) -> str:
    """Everything that fails in a report, worst first; where nothing fails, everything that was not proven."""
    model = [judgement for judgement in report.judgements if _is_missed(judgement.verdict, report)]
    batches = sorted((batch for batch in report.batches if _is_missed(batch.verdict, report)), key=_urgency)
    shown = {batch.batch_size: _missed(batch, report) for batch in sorted(batches[:_SHOWN], key=_place)}
    lines = [line for judgement in model for line in _lines_of(judgement)]
    lines += _batch_lines(shown)
    if len(batches) > len(shown):
        rest = sorted(batch.batch_size for batch in batches[_SHOWN:])
        lines.append(f"... and {len(rest)} more: batch {_sizes_text(rest)}")
    if report.device is not None:
        lines.append(_INDENT + device_text(report.device))
    remedies = [line for judgement in model for line in judgement.remedy.splitlines()] + _remedies(shown)
    remedies += accept_hints(report, [judgement for batch in batches for judgement in _missed(batch, report)])
    judgements = [*model, *(judgement for missed in shown.values() for judgement in missed)]
    ids = list(dict.fromkeys(judgement.hazard for judgement in judgements if judgement.hazard))
    remedies += [f"more: pytest-cudagraph explain {' '.join(ids[:_EXPLAINED])}"] if ids else []
    return "\n".join([*lines, *(_INDENT + remedy for remedy in dict.fromkeys(remedies))])


def _is_missed(verdict: Verdict, report: GraphReport) -> bool:
    return verdict.fails if report.verdict.fails else verdict is not Verdict.PASSED


def _missed(batch: BatchReport, report: GraphReport) -> list[Judgement]:
    missed = [judgement for judgement in batch.judgements if _is_missed(judgement.verdict, report)]
    return sorted(missed, key=lambda judgement: -judgement.verdict.severity)


def _urgency(batch: BatchReport) -> tuple[int, float, int]:
    """The order of choice if not all fit: the worst verdict, then the speedup furthest below its target."""
    shortfall = 1.0
    if batch.timing is not None and batch.min_speedup:
        shortfall = batch.timing.speedup.estimate / batch.min_speedup
    return (-batch.verdict.severity, shortfall, batch.batch_size)


def _place(batch: BatchReport) -> tuple[int, int]:
    """The order on the screen: the worst verdict, then the batch size."""
    return (-batch.verdict.severity, batch.batch_size)


def _batch_lines(shown: Mapping[int, Sequence[Judgement]]) -> list[str]:
    """Each sentence once, with its evidence and its batch sizes."""
    sizes: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    judgements: dict[tuple[str, tuple[str, ...]], Judgement] = {}
    for batch_size, missed in shown.items():
        for judgement in missed:
            key = (judgement.reason, judgement.evidence)
            sizes.setdefault(key, []).append(batch_size)
            judgements.setdefault(key, judgement)
    lines = []
    for key, judgement in judgements.items():
        lines += _lines_of(judgement, f"batch {_sizes_text(sizes[key])}: ")
    return lines


def _sizes_text(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


def _lines_of(judgement: Judgement, prefix: str = "") -> list[str]:
    """The judgement's sentence and, indented, its evidence. Both may have several lines."""
    sentence = judgement.reason if judgement.reason.startswith(prefix) else prefix + judgement.reason
    first, *more = sentence.splitlines() or [judgement.verdict.value]
    evidence = [line for item in judgement.evidence for line in item.splitlines()]
    return [first, *(_INDENT + line for line in [*more, *evidence])]


def _remedies(missed: Mapping[int, Sequence[Judgement]]) -> list[str]:
    """Each remedy once, with its batch sizes unless it is for all of them."""
    sizes: dict[str, list[int]] = {}
    for batch_size, judgements in missed.items():
        for remedy in dict.fromkeys(judgement.remedy for judgement in judgements if judgement.remedy):
            sizes.setdefault(remedy, []).append(batch_size)
    lines = []
    for remedy, batches in sizes.items():
        where = "" if len(batches) == len(missed) else f"batch {_sizes_text(batches)}: "
        lines += f"{where}{remedy}".splitlines()
    return lines
