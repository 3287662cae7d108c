"""The message of a failing test, with the marker that would accept it; the marker that a measurement supports."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from pytest_cudagraph.report.table import UNTIMED, device_text
from pytest_cudagraph.units import factor_text
from pytest_cudagraph.values import BatchReport, GateName, GraphReport, Judgement, MinSource, Timing, Verdict


def accept_hints(report: GraphReport, missed: Sequence[Judgement]) -> list[str]:
    """``to accept: @pytest.mark.graph_speedup(min={1: 1.85, 8: 1.20})``, and the like for kernels and another revision.

    One line per setting, since a second marker for the same key would not be heard. A gate that some batch size cannot
    pass by any setting has none.
    """
    lines = [_speedup_line(report)] if any(each.gate == "speedup" for each in missed) else []
    kernels = _largest(missed, "structure")
    if kernels is not None:
        marker = f"@pytest.mark.graph_speedup(max_new_kernels={kernels:g})"
        lines.append(f"to accept: {marker}, or {report.update_option}")
    slowdown = _largest(missed, "base")
    if slowdown is not None:
        lines.append(f"to accept: --cudagraph-base-slowdown={slowdown:.2f}")
    return [line for line in lines if line]


def _largest(missed: Iterable[Judgement], gate: GateName) -> float | None:
    return max((each.accept for each in missed if each.gate == gate and each.accept is not None), default=None)


def _speedup_line(report: GraphReport) -> str:
    """Every batch size is in it: one that is left out of a mapping would no longer be measured."""
    least: dict[int, float] = {}
    accepted: list[float] = []
    for batch in report.batches:
        judgement = next((each for each in batch.judgements if each.gate == "speedup"), None)
        accept = judgement.accept if judgement else None
        if judgement is not None and judgement.verdict is Verdict.FAILED and accept is None:
            return ""
        accepted += [] if accept is None else [accept]
        value = batch.min_speedup if accept is None else accept
        least |= {} if value is None else {batch.batch_size: value}
    return f"to accept: {min_line(least, report.min_source)}" if accepted else ""


def min_line(least: Mapping[int, float], source: MinSource) -> str:
    """What to write, and where, for these least speedups to be asked for: where ``source`` says that it is decided."""
    argument = _min_text(least, source)
    if source.place == "argument":
        return f"min_speedup={argument} in the call: its argument overrides markers"
    marker = f"@pytest.mark.graph_speedup(min={argument})"
    return f"{marker} in place of the marker that asks for more" if source.place == "marker" else marker


def _min_text(least: Mapping[int, float], source: MinSource) -> str:
    values = {size: _number_text(value) for size, value in sorted(least.items())}
    if len(set(values.values())) == 1 and not source.is_mapping:
        return next(iter(values.values()))
    return f"{{{', '.join(f'{size}: {value}' for size, value in values.items())}}}"


def _number_text(value: float) -> str:
    """Two decimals, and more only where the value has them: what was asked for is not to be made stricter."""
    text = f"{value:.2f}"
    return text if abs(float(text) - value) < 1e-9 else f"{value:g}"


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


_SHOWN = 4
"""Batch sizes told in full: with evidence they fill a screen."""

_EXPLAINED = 3
"""Hazards named in the last line: a reader takes up the first."""

_INDENT = "  "


def failure_text(report: GraphReport) -> str:
    """Everything that fails in a report, worst first; where nothing fails, everything that was not proven."""
    model = [judgement for judgement in report.judgements if _is_missed(judgement.verdict, report)]
    batches = sorted((batch for batch in report.batches if _is_missed(batch.verdict, report)), key=_urgency)
    told = {batch.batch_size: _missed(batch, report) for batch in sorted(batches[:_SHOWN], key=_order)}
    lines = [line for judgement in model for line in _told(judgement)]
    lines += _batch_lines(told)
    if len(batches) > len(told):
        lines.append(_rest(batches[_SHOWN:]))
    if report.device is not None:
        lines.append(_INDENT + device_text(report.device))
    remedies = [line for judgement in model for line in judgement.remedy.splitlines()] + _remedies(told)
    remedies += accept_hints(report, [judgement for batch in batches for judgement in _missed(batch, report)])
    remedies += _more([*model, *(judgement for judgements in told.values() for judgement in judgements)])
    return "\n".join([*lines, *(_INDENT + remedy for remedy in dict.fromkeys(remedies))])


def _more(told: Sequence[Judgement]) -> list[str]:
    """Where the pages on the hazards can be read; one line, however many there are."""
    ids = list(dict.fromkeys(judgement.hazard for judgement in told if judgement.hazard))
    return [f"more: pytest-cudagraph explain {' '.join(ids[:_EXPLAINED])}"] if ids else []


def _is_missed(verdict: Verdict, report: GraphReport) -> bool:
    return verdict.fails if report.verdict.fails else verdict is not Verdict.PASSED


def _missed(batch: BatchReport, report: GraphReport) -> list[Judgement]:
    found = [judgement for judgement in batch.judgements if _is_missed(judgement.verdict, report)]
    return sorted(found, key=lambda judgement: -judgement.verdict.severity)


def _urgency(batch: BatchReport) -> tuple[int, float, int]:
    """Which are told where there is no room for all: the worst verdict, the speedup furthest below its target."""
    shortfall = 1.0
    if batch.timing is not None and batch.min_speedup:
        shortfall = batch.timing.speedup.estimate / batch.min_speedup
    return (-batch.verdict.severity, shortfall, batch.batch_size)


def _order(batch: BatchReport) -> tuple[int, int]:
    """In which order they are told: the worst verdict names the failure, within it a reader looks for the number."""
    return (-batch.verdict.severity, batch.batch_size)


def _batch_lines(told: Mapping[int, Sequence[Judgement]]) -> list[str]:
    """What was found, each sentence once with its evidence and the batch sizes it holds for."""
    sizes: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    found: dict[tuple[str, tuple[str, ...]], Judgement] = {}
    for batch_size, missed in told.items():
        for judgement in missed:
            key = (judgement.reason, judgement.evidence)
            sizes.setdefault(key, []).append(batch_size)
            found.setdefault(key, judgement)
    return [line for key, judgement in found.items() for line in _told(judgement, f"batch {_sizes_text(sizes[key])}: ")]


def _sizes_text(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


def _told(judgement: Judgement, prefix: str = "") -> list[str]:
    """The judgement's sentence and, indented, its evidence; both may be of several lines."""
    sentence = judgement.reason if judgement.reason.startswith(prefix) else prefix + judgement.reason
    first, *more = sentence.splitlines() or [judgement.verdict.value]
    evidence = [line for item in judgement.evidence for line in item.splitlines()]
    return [first, *(_INDENT + line for line in [*more, *evidence])]


def _rest(batches: Sequence[BatchReport]) -> str:
    sizes = sorted(batch.batch_size for batch in batches)
    return f"... and {len(batches)} more: batch {_sizes_text(sizes)}"


def _remedies(missed: Mapping[int, Sequence[Judgement]]) -> list[str]:
    """Each remedy once, with the batch sizes it is for, unless it is for all of them."""
    sizes: dict[str, list[int]] = {}
    for batch_size, judgements in missed.items():
        for remedy in dict.fromkeys(judgement.remedy for judgement in judgements if judgement.remedy):
            sizes.setdefault(remedy, []).append(batch_size)
    return [
        line
        for remedy, batches in sizes.items()
        for line in f"{_for_batches(batches, of=len(missed))}{remedy}".splitlines()
    ]


def _for_batches(batches: Sequence[int], *, of: int) -> str:
    return "" if len(batches) == of else f"batch {_sizes_text(batches)}: "
