"""The summary of a run: one table per device, and the lines below it."""

from __future__ import annotations

import math
import posixpath
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_cudagraph.foreign import printable
from pytest_cudagraph.report.columns import MAX_WIDTH, Column, fits, grid
from pytest_cudagraph.report.generations import generation_tables
from pytest_cudagraph.units import factor_text, latency_text, plural
from pytest_cudagraph.values import (
    Agreement,
    BatchReport,
    DeviceInfo,
    GraphReport,
    Interval,
    Latency,
    SavedBatch,
    Verdict,
    is_emulated,
)


def device_text(device: DeviceInfo) -> str:
    """``NVIDIA H200, driver 580.159, torch 2.11.0``, or ``cpu: AMD EPYC 9B45, torch 2.13.0``."""
    if is_emulated(device.name):
        return f"{device.name}, no GPU, torch {device.torch}"
    name = f"cpu: {device.name}" if device.kind == "cpu" else device.name
    driver = f", driver {device.driver}" if device.driver else ""
    return f"{name}{driver}, torch {device.torch}"


def header(device: DeviceInfo, *, baseline: str, min_speedup: float, judged: bool) -> str:
    """The line above the tests. ``judged`` is false in a rehearsal: speed is shown and not judged."""
    gate = f"gate {factor_text(min_speedup)}" if judged else "rehearsal: speed is not judged"
    threads = f", {plural(device.threads, 'thread')}" if device.kind == "cpu" else ""
    return f"cudagraph: {device_text(device)}{threads}; baseline {baseline}; {gate}"


UNTIMED = (Verdict.WRONG, Verdict.NOT_CAPTURED)
"""Verdicts without timings: a wrong or missing graph is not the model."""

_MIN_TEST = 20
"""With less width for a test's name, the intervals are left out."""

_LISTED = 5
"""Lines of one kind below the table. The rest is only counted."""

_ACCEPTED = 50
"""The same for entries that an update replaces, because they may hide a slowdown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table. Times in nanoseconds, None if there is nothing to show."""

    test: str
    batch_size: int | None
    word: str
    eager_ns: float | None = None
    compiled_ns: float | None = None
    replay_ns: float | None = None
    speedup: Interval | None = None
    min_speedup: float | None = None
    note: str = ""
    """Shown on a line below: why there are no timings, or how the graph changed."""


def table(reports: Iterable[GraphReport]) -> list[str]:
    """The table of a run: one block per device, under a line that names the device."""
    lines: list[str] = []
    for device, own in by_device(reports).items():
        rows = [row for report in own for row in rows_of(report)]
        short = _without_common_folder(rows)
        shown = {row.test: other.test for row, other in zip(rows, short, strict=True)}
        lines += [device, *render(short), *generation_tables(own, shown)]
    return lines


def by_device(reports: Iterable[GraphReport]) -> dict[str, list[GraphReport]]:
    """The reports of each device, by its description."""
    found: dict[str, list[GraphReport]] = {}
    for report in reports:
        found.setdefault(device_text(report.device) if report.device else "no device", []).append(report)
    return found


def _without_common_folder(rows: Sequence[Row]) -> list[Row]:
    """The same rows without a folder that is common to all tests."""
    names = {row.test for row in rows}
    if any("::" not in name for name in names):
        return list(rows)
    folder = posixpath.commonpath([posixpath.dirname(name.partition("::")[0]) or "." for name in names])
    return [replace(row, test=row.test.removeprefix(f"{folder}/")) for row in rows]


def rows_of(report: GraphReport) -> list[Row]:
    """The rows of one report. A model that reached no batch size has one."""
    if report.batches:
        return [_row(report, batch) for batch in report.batches]
    worst = next((judgement for judgement in report.judgements if judgement.verdict is report.verdict), None)
    word = report.verdict.value.replace("-", " ")
    return [Row(test=report.name, batch_size=None, word=word, note=worst.reason if worst else "")]


def _row(report: GraphReport, batch: BatchReport) -> Row:
    timing = None if batch.verdict in UNTIMED else batch.timing
    return Row(
        test=report.name,
        batch_size=batch.batch_size,
        word=batch.word,
        eager_ns=timing.eager.median_ns if timing else None,
        compiled_ns=_median(timing.compiled) if timing else None,
        replay_ns=timing.replay.median_ns if timing else None,
        speedup=timing.speedup if timing else None,
        min_speedup=batch.min_speedup,
        note=_note(batch),
    )


def _note(batch: BatchReport) -> str:
    if batch.verdict in UNTIMED:
        return batch.worst.reason if batch.worst else ""
    saved, now = batch.baseline, batch.receipt
    if not isinstance(saved, SavedBatch) or now is None or saved.kernels == now.kernels:
        return ""
    return next((judgement.reason for judgement in batch.judgements if judgement.gate == "structure"), "")


def _median(latency: Latency | None) -> float | None:
    return latency.median_ns if latency else None


def render(rows: Sequence[Row]) -> list[str]:
    """A title line, one line per row, and below each row its note."""
    compiled = any(row.compiled_ns is not None for row in rows)
    columns = columns_of(compiled)
    shown = _named_once(rows)
    cells = [cells_of(row, compiled=compiled, interval=True) for row in shown]
    if not fits(columns, cells, first=_MIN_TEST):
        cells = [cells_of(row, compiled=compiled, interval=False) for row in shown]
    title, *lines = grid(columns, cells)
    return [title, *_with_notes(rows, lines)]


def columns_of(compiled: bool) -> list[Column]:
    """The titles of the table."""
    numbers = ["batch", "eager", *(["compiled"] if compiled else []), "replay", "speedup", "target"]
    return [Column(title=title, right=title in numbers) for title in ("test", *numbers, "verdict")]


def cells_of(row: Row, *, compiled: bool, interval: bool) -> list[str]:
    """The texts of a row, one for each column."""
    return [
        row.test,
        "-" if row.batch_size is None else str(row.batch_size),
        _latency(row.eager_ns),
        *([_latency(row.compiled_ns)] if compiled else []),
        _latency(row.replay_ns),
        _speedup(row.speedup, interval=interval),
        "-" if row.min_speedup is None else factor_text(row.min_speedup),
        row.word,
    ]


def _latency(nanoseconds: float | None) -> str:
    return "-" if nanoseconds is None else latency_text(nanoseconds)


def _speedup(speedup: Interval | None, *, interval: bool) -> str:
    if speedup is None:
        return "-"
    # With too few blocks there are not two bounds, and the column has no room for an explanation.
    bounds = f" ({speedup.low:.2f}-{speedup.high:.2f})" if interval and math.isfinite(speedup.high) else ""
    return factor_text(speedup.estimate) + bounds


def _named_once(rows: Sequence[Row]) -> list[Row]:
    """The same rows, a test's name only on its first."""
    named: list[Row] = []
    last = None
    for row in rows:
        named.append(row if row.test != last else replace(row, test=""))
        last = row.test
    return named


def _with_notes(rows: Sequence[Row], lines: Sequence[str]) -> list[str]:
    found: list[str] = []
    for row, line in zip(rows, lines, strict=True):
        found += [line, *_wrapped(row.note, MAX_WIDTH, indent="  ")]
    return found


def closing(
    reports: Sequence[GraphReport],
    counts: Mapping[str, int],
    *,
    wrote: tuple[int, str] | None = None,
    refused: Sequence[tuple[str, int, str]] = (),
    replaced: Sequence[tuple[str, int, str]] = (),
    stale: Sequence[tuple[str, int]] = (),
) -> list[str]:
    """The lines below the table: counts, what was not decided and why, what was written.

    ``wrote`` is the number of entries and the file, ``refused`` the entries that may not be written (name, batch size,
    reason), ``replaced`` the entries that were replaced (name, batch size, change), ``stale`` the entries without a
    test.
    """
    lines = [", ".join(f"{count} {word}" for word, count in counts.items() if count) or "nothing measured"]
    lines += _undecided(reports)
    lines += _listed("faster", list(_faster(reports)))
    lines += _listed("warning", list(_by_sizes(reports, lambda agreement: agreement.warnings)))
    lines += _listed("note", list(_notes(reports)))
    lines += _listed("stale", [f"{name}, batch {batch_size}" for name, batch_size in stale])
    lines += _listed("not written", [_of_batch(each) for each in refused])
    lines += _listed("accepted", [_of_batch(each) for each in replaced], most=_ACCEPTED)
    if wrote is not None:
        count, path = wrote
        lines.append(f"wrote {count} {'entry' if count == 1 else 'entries'} to {path}")
    return lines


def _of_batch(found: tuple[str, int, str]) -> str:
    name, batch_size, text = found
    return f"{name}, batch {batch_size}: {text}"


def _faster(reports: Sequence[GraphReport]) -> Iterator[str]:
    """Gains, to be saved: the gate protects only what is saved."""
    for report in reports:
        for batch in report.batches:
            judgement = next((each for each in batch.judgements if each.gate == "baseline"), None)
            if batch.comparison == "faster" and batch.verdict is Verdict.PASSED and judgement:
                yield f"{report.name}, batch {batch.batch_size}: {judgement.reason}; {judgement.remedy}"


def _undecided(reports: Sequence[GraphReport]) -> list[str]:
    inconclusive = [
        f"{report.name}, batch {batch.batch_size}: {batch.worst.reason}"
        for report in reports
        for batch in report.batches
        if batch.verdict is Verdict.INCONCLUSIVE and batch.worst
    ]
    return _listed("inconclusive", inconclusive) + _not_judged(reports)


def _not_judged(reports: Sequence[GraphReport]) -> list[str]:
    """One line per reason. A rehearsal has only one."""
    reasons: dict[str, int] = {}
    for report in reports:
        for batch in report.batches:
            if batch.verdict is Verdict.NOT_JUDGED and batch.worst:
                reasons[batch.worst.reason] = reasons.get(batch.worst.reason, 0) + 1
    lines = [f"{reason} ({plural(count, 'batch size')})" for reason, count in reasons.items()]
    return [part for line in lines for part in _wrapped(line, MAX_WIDTH)]


def _notes(reports: Sequence[GraphReport]) -> Iterator[str]:
    """What limits the result of a test that passed: notes of the check, and what the audit could not inspect."""
    for report in reports:
        yield from _by_sizes([report], _limits)
        yield from (f"{report.name}: {note}" for note in report.notes)
        yield from (f"{report.name}: not judged: {what}" for what in report.not_judged)


def _by_sizes(reports: Sequence[GraphReport], texts_of: Callable[[Agreement], tuple[str, ...]]) -> Iterator[str]:
    """Each text of the check once per test, with its batch sizes."""
    for report in reports:
        sizes: dict[str, list[str]] = {}
        for batch in report.batches:
            for text in texts_of(batch.agreement) if batch.agreement else ():
                sizes.setdefault(text, []).append(str(batch.batch_size))
        yield from (f"{report.name}, batch {', '.join(of)}: {text}" for text, of in sizes.items())


def _limits(agreement: Agreement) -> tuple[str, ...]:
    opaque = ", ".join(agreement.not_compared)
    return (*agreement.notes, f"not compared: {opaque}") if opaque else agreement.notes


def _listed(kind: str, items: Sequence[str], most: int = _LISTED) -> list[str]:
    lines = [line for item in items[:most] for line in _wrapped(f"{kind}: {item}", MAX_WIDTH, names=True)]
    return [*lines, f"{kind}: ... and {len(items) - most} more"] if len(items) > most else lines


def _wrapped(text: str, width: int, *, indent: str = "", names: bool = False) -> list[str]:
    """Lines of at most ``width`` columns. With ``names`` a longer node id is not split."""
    return textwrap.wrap(
        printable(text),
        width=width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_on_hyphens=False,
        break_long_words=not names,
    )
