"""The message of a failing test: allowed and found, the evidence, the device, the remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_cudagraph.report.accepting import acceptances
from pytest_cudagraph.report.header import device_text
from pytest_cudagraph.values import BatchReport, GraphReport, Judgement, Verdict

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
    remedies += acceptances(report, [judgement for batch in batches for judgement in _missed(batch, report)])
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
