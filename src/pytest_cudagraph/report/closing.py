"""The lines below the table: counts, what was not decided or not judged, and what was written."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from pytest_cudagraph.baseline import Key
from pytest_cudagraph.report.columns import MAX_WIDTH, wrapped
from pytest_cudagraph.units import factor_text, plural
from pytest_cudagraph.values import Agreement, GraphReport, Verdict

_LISTED = 5
"""Lines of one kind below the table. The rest is only counted."""

_ACCEPTED = 50
"""The same for entries that an update replaces, because they may hide a slowdown."""


def closing(
    reports: Sequence[GraphReport],
    counts: Mapping[str, int],
    *,
    wrote: tuple[int, str] | None = None,
    refused: Sequence[tuple[str, int, str]] = (),
    replaced: Sequence[tuple[str, int, str]] = (),
    stale: Sequence[tuple[str, int]] = (),
    dropped: Sequence[tuple[str, int]] = (),
    saves: bool = False,
) -> list[str]:
    """The lines below the table: counts, what was not decided and why, what was written.

    ``wrote`` is the number of entries and the file, ``refused`` the entries that may not be written (name, batch size,
    reason), ``replaced`` the entries that were replaced (name, batch size, change), ``stale`` the entries without a
    test, ``dropped`` those that were removed. ``saves``: whether this run saves what passes.
    """
    lines = [", ".join(f"{count} {word}" for word, count in counts.items() if count) or "nothing measured"]
    lines += _undecided(reports)
    lines += _how_to_save(reports, saves=saves) if counts.get("no baseline yet") else []
    lines += _listed("faster", list(_faster(reports)))
    lines += _listed("warning", list(_warnings(reports)))
    lines += _listed("note", list(_notes(reports)))
    lines += _listed("stale", [f"{name}, batch {batch_size}" for name, batch_size in stale])
    lines += _listed("dropped", _of_batches([(*key, "its test passed without this batch size") for key in dropped]))
    lines += _listed("not written", _of_batches(refused))
    lines += _listed("accepted", [f"{name}, batch {size}: {text}" for name, size, text in replaced], most=_ACCEPTED)
    if wrote is not None:
        count, path = wrote
        lines.append(f"wrote {plural(count, 'entry')} to {path}")
    return lines


def _how_to_save(reports: Sequence[GraphReport], *, saves: bool) -> list[str]:
    """The whole command that saves what is not saved yet, for each kind of device. A run that saves has it."""
    if saves:
        return ["no baseline yet: an entry is saved when its test passes every gate"]
    lacking = [each for each in reports if any(batch.comparison == "new" for batch in each.batches)]
    commands = dict.fromkeys(each.update_option for each in lacking)
    return [f"no baseline yet; to save one: pytest --cudagraph {options}" for options in commands]


def _of_batches(told: Iterable[tuple[str, int, str]]) -> list[str]:
    """One text for all batch sizes of a test with the same reason."""
    sizes: dict[tuple[str, str], list[str]] = {}
    for name, batch_size, text in told:
        sizes.setdefault((name, text), []).append(str(batch_size))
    return [f"{name}, batch {', '.join(of)}: {text}" for (name, text), of in sizes.items()]


def _faster(reports: Sequence[GraphReport]) -> Iterator[str]:
    """Gains, to be saved: the gate protects only what is saved."""
    for report in reports:
        for batch in report.batches:
            judgement = batch.judged_by("baseline")
            if batch.comparison == "faster" and batch.verdict is Verdict.PASSED and judgement:
                yield f"{report.name}, batch {batch.batch_size}: {judgement.reason}; {judgement.remedy}"


def _undecided(reports: Sequence[GraphReport]) -> list[str]:
    """What is inconclusive, and one line per reason not to judge. A rehearsal has only one."""
    worst = [(report.name, batch.batch_size, batch.worst) for report in reports for batch in report.batches]
    told = [(name, size, judgement) for name, size, judgement in worst if judgement]
    inconclusive = [each for each in told if each[2].verdict is Verdict.INCONCLUSIVE]
    reasons = Counter(judgement.reason for *_, judgement in told if judgement.verdict is Verdict.NOT_JUDGED)
    lines = _listed("inconclusive", [f"{name}, batch {size}: {worst.reason}" for name, size, worst in inconclusive])
    not_judged = [f"{reason} ({plural(count, 'batch size')})" for reason, count in reasons.items()]
    return lines + [part for line in not_judged for part in wrapped(line, MAX_WIDTH)]


def _warnings(reports: Sequence[GraphReport]) -> Iterator[str]:
    """What may be wrong although no call has shown it: warnings of the audit and of the check."""
    for report in reports:
        for each in (finding for finding in report.findings if finding.level == "warning"):
            place = f"{each.site}: " if each.site else ""
            yield f"{report.name}: {place}{each.message} [{each.id}]; fix: {each.fix}"
        yield from _of_check(report, lambda agreement: agreement.warnings)


def _notes(reports: Sequence[GraphReport]) -> Iterator[str]:
    """What limits the result of a test that passed: notes of the check, and what the audit could not inspect."""
    for report in reports:
        yield from _of_check(report, _limits)
        yield from _default_targets(report)
        yield from (f"{report.name}: {note}" for note in report.notes)
        yield from (f"{report.name}: not judged: {what}" for what in report.not_judged)


def _default_targets(report: GraphReport) -> Iterator[str]:
    """The batch sizes that ``min={...}`` leaves out: their target is the default."""
    sizes = [each for each in report.batches if each.batch_size in report.min_source.default_sizes]
    if sizes and sizes[0].min_speedup is not None:
        shown = ", ".join(str(each.batch_size) for each in sizes)
        target = factor_text(sizes[0].min_speedup)
        yield f"{report.name}, batch {shown}: min names no target; {target} is the default (--cudagraph-min-speedup)"


def _of_check(report: GraphReport, texts_of: Callable[[Agreement], tuple[str, ...]]) -> list[str]:
    checked = [(batch.batch_size, batch.agreement) for batch in report.batches if batch.agreement]
    return _of_batches((report.name, size, text) for size, agreement in checked for text in texts_of(agreement))


def _limits(agreement: Agreement) -> tuple[str, ...]:
    opaque = ", ".join(agreement.not_compared)
    return (*agreement.notes, f"not compared: {opaque}") if opaque else agreement.notes


def _listed(kind: str, items: Sequence[str], most: int = _LISTED) -> list[str]:
    lines = [line for item in items[:most] for line in wrapped(f"{kind}: {item}", MAX_WIDTH, names=True)]
    return [*lines, f"{kind}: ... and {len(items) - most} more"] if len(items) > most else lines


def strict_text(stale: Sequence[Key], saved: Iterable[Key], file: str) -> str:
    """Why a strict run fails, and the commands that remove what is stale in a file."""
    sizes: dict[str, list[int]] = {}
    for name, batch_size in stale:
        sizes.setdefault(name, []).append(batch_size)
    # Sizes that a test still covers stay: a name alone would remove them as well.
    live = {name for name, _ in set(saved) - set(stale)}
    names_of: dict[tuple[int, ...], list[str]] = {}
    for name in list(sizes)[:_LISTED]:
        names_of.setdefault(tuple(sizes[name]) if name in live else (), []).append(name)
    commands = []
    for batch_sizes, names in names_of.items():
        only = f" --batch-size {' '.join(map(str, batch_sizes))}" if batch_sizes else ""
        commands.append(f"pytest-cudagraph baseline prune {shlex.quote(file)} --name {shlex.join(names)}{only}")
    first = f" (the first {_LISTED} of {len(sizes)} tests)" if len(sizes) > _LISTED else ""
    prune = " && ".join(commands)
    return f"strict: {len(stale)} stale in {file}; where no test is meant to cover them{first}: {prune}"
