"""The end of a run: what is written and what the summary says. It imports no torch: an xdist controller needs none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pytest_cudagraph import environment, files, gate, record, report
from pytest_cudagraph.baseline import AnyPath, Edit, JsonStore, Key
from pytest_cudagraph.errors import BaselineError
from pytest_cudagraph.foreign import message_of, printable, printable_lines, without_credentials
from pytest_cudagraph.gpu_locks import measured_on
from pytest_cudagraph.settings.options import Settings
from pytest_cudagraph.values import Addition, DeviceInfo, GraphReport, ReportColumn, SavedBatch, Table

_LEFT = ".cudagraph-left"
"""The folder for entries that an object store did not take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedTests:
    """Which tests pytest collected and ran, and which of them passed."""

    passed: frozenset[str]
    files: frozenset[str] = frozenset()
    """The files with collected tests, relative to the root directory."""
    finished: bool
    """False after Ctrl-C or an internal error. Then nothing is written."""
    complete: bool
    """Whether all tests of the project were collected, and every one with this plugin's fixtures passed."""
    paths: tuple[str, ...]
    """The collected files and folders, relative to the root directory. ``.`` is the root directory."""
    given_sizes: frozenset[int] = frozenset()
    """The batch sizes of the command line. Empty where it gives none."""
    folder: Path = field(default_factory=Path)
    """The folder in which pytest was called. The paths of documents are relative to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The summary of a run. ``failed``: the exit status is non-zero even if no test failed."""

    table: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    failed: bool = False


@dataclass(slots=True)
class SummaryLines:
    """What the summary of a run says so far."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def header_line(device: DeviceInfo, baseline_file: AnyPath, settings: Settings, *, judged: bool) -> str:
    """What this run measures on, its baseline file and its least speedup."""
    baseline = _path_text(baseline_file, settings.rootdir) if settings.uses_baseline else "off"
    return printable(report.header(device, baseline=baseline, min_speedup=settings.min_speedup, judged=judged))


def end_run(
    reports: Sequence[GraphReport],
    collected: CollectedTests,
    settings: Settings,
    saved: Mapping[DeviceInfo, Mapping[Key, SavedBatch]] | None = None,
    *,
    additions: Sequence[Addition] = (),
    workloads: Sequence[Mapping[str, Any]] = (),
    columns: Sequence[ReportColumn] = (),
    tables: Sequence[Table] = (),
    problems: Sequence[str] = (),
) -> RunSummary:
    """Write the baseline, the JSON document and the HTML page, and make the summary.

    ``saved`` are the entries read at the start, by device. The file of another device is read now. For the document
    there are the ``additions`` of features, and ``workloads``, the tests with that mark. ``columns`` and
    ``tables`` are other plugins', ``problems`` what their hooks raised.

    What cannot be made or written is a problem in the summary, not an exception. All else is still made and written.
    """
    summary, results = SummaryLines(problems=list(problems)), list[str]()
    marked = [report.WorkloadTest(**each) for each in workloads]
    for device in _devices(reports):
        with _net("the baseline", summary):
            own_reports = [each for each in reports if each.device == device]
            _end_device(device, own_reports, collected, settings, summary, (saved or {}).get(device))
    with _net("the tables", summary):
        tables = report.run_tables(reports, tables, additions, marked, settings)
    with _net("the summary", summary):
        summary.lines += _lines_below(reports, tables, additions, settings)
    with _net("the document", summary):
        _write_documents(reports, additions, marked, tables, settings, collected.folder, summary)
    with _net("the table", summary):
        results = report.table(reports, columns)
    return RunSummary(
        table=tuple(map(printable, results)),
        lines=tuple(map(printable, summary.lines)),
        problems=tuple(map(printable_lines, summary.problems)),
        failed=bool(summary.problems),
    )


@contextlib.contextmanager
def _net(what: str, summary: SummaryLines) -> Iterator[None]:
    """Turn whatever is raised into a problem: the other files of the run are still written.

    What pytest raises to fail or to skip a test, and ``sys.exit``, are no ``Exception``.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        summary.problems.append(f"{what} could not be made: {type(error).__name__}: {message_of(error)}")


def _devices(reports: Iterable[GraphReport]) -> list[DeviceInfo]:
    return list(dict.fromkeys(each.device for each in reports if each.device is not None))


def _lines_below(
    reports: Sequence[GraphReport], tables: Iterable[Table], additions: Iterable[Addition], settings: Settings
) -> list[str]:
    """What stands below the counts. The tables of scenarios stand below those of the results."""
    shown = [table for table in tables if table.in_terminal and table not in report.scenario_tables(reports)]
    return [
        *measured_on(reports),
        *(report.suggestions(reports) if settings.suggest else ()),
        *(line for addition in additions for line in addition.lines),
        *(line for table in shown for line in report.text_of(table)),
    ]


def _write_documents(
    reports: Sequence[GraphReport],
    additions: Sequence[Addition],
    workloads: Sequence[report.WorkloadTest],
    tables: Sequence[Table],
    settings: Settings,
    folder: Path,
    summary: SummaryLines,
) -> None:
    if not (settings.json or settings.html):
        return
    device, commit = next(iter(_devices(reports)), None), environment.commit(settings.rootdir)
    document = report.document(
        reports, device, settings, additions, workloads, tables=tables, date=_now(), commit=commit
    )
    if settings.json:
        _write("--cudagraph-json", settings.json, folder, lambda: report.json_text(document), summary)
    if settings.html:
        # Read back: the command makes the same page of the file later.
        written = _write(
            "--cudagraph-html", settings.html, folder, lambda: report.page(report.run_of_document(document)), summary
        )
        summary.lines += [f"wrote the page {_path_text(folder / settings.html, folder)}"] if written else []


def _write(flag: str, path: str, folder: Path, text_of: Callable[[], str], summary: SummaryLines) -> bool:
    """Write a document whole or not at all. A failure is a line of the summary."""
    try:
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(target, text_of())
    # Also ValueError, for a path with a null character. The other file is still written.
    except Exception as error:
        reason = getattr(error, "strerror", None) or message_of(error)
        summary.problems.append(f"{flag}: {path} could not be written: {reason}; nothing was changed")
        return False
    return True


def _end_device(
    device: DeviceInfo,
    reports: Sequence[GraphReport],
    collected: CollectedTests,
    settings: Settings,
    summary: SummaryLines,
    saved: Mapping[Key, SavedBatch] | None,
) -> None:
    """Save what was asked for, and say what is new, slower, stale or refused. ``saved`` is read where it is None."""
    try:
        store = JsonStore(settings.baseline_folder, device)
        saved, plan = _save(store, reports, collected, settings, saved)
    except BaselineError as error:
        summary.problems.append(str(error))
        return
    saved = {key: entry for key, entry in saved.items() if key not in plan.dropped}
    expected = _expected(saved, reports, collected, settings.rootdir)
    stale = record.stale(reports, expected, complete_run=collected.complete)
    written = {(entry.name, entry.batch_size): entry for entry in plan.write}
    # An update must not hide a slowdown.
    replaced = [(*key, gate.replaced_text(saved[key], written[key])) for key in plan.changed]
    summary.lines += report.closing(
        reports,
        record.counts(reports, expected, complete_run=collected.complete, plan=plan),
        wrote=(len(plan.write), _path_text(store.path, settings.rootdir)) if plan.write else None,
        refused=plan.refused,
        replaced=[each for each in replaced if each[2]],
        stale=stale,
        dropped=plan.dropped,
        saves=settings.update != "never",
    )
    if stale and settings.strict:
        summary.problems.append(report.strict_text(stale, saved, _path_text(store.path, settings.rootdir)))


def _save(
    store: JsonStore,
    reports: Sequence[GraphReport],
    collected: CollectedTests,
    settings: Settings,
    saved: Mapping[Key, SavedBatch] | None,
) -> tuple[Mapping[Key, SavedBatch], record.Plan]:
    """The saved entries, and what was written. Nothing without ``--cudagraph-update`` or after an interrupted run."""
    update = settings.update
    if not settings.uses_baseline:
        return {}, record.Plan()
    if update == "never" or not collected.finished:
        return store.load() if saved is None else saved, record.Plan()
    passed = [each for each in reports if each.nodeid in collected.passed]
    saved_at, commit = _now(), environment.commit(settings.rootdir) or {}
    short = f"{commit['id'][:7]}{'+' * commit['dirty']}" if commit else ""
    plan = record.Plan()

    def choose(entries: Mapping[Key, SavedBatch]) -> Edit:
        nonlocal plan
        expected = _expected(entries, reports, collected, settings.rootdir)
        stale = record.stale(reports, expected, complete_run=collected.complete)
        dropped = record.outgrown(stale, reports, collected.passed)
        plan = replace(record.entries(passed, update, entries, saved_at=saved_at, commit=short), dropped=dropped)
        return Edit(plan.write, plan.dropped)

    try:
        return store.update(choose, commit_info=commit, continues=update != "all"), plan
    except BaselineError as error:
        if isinstance(store.path, Path) or not (plan.write or choose(saved or {}).write):
            raise
        raise BaselineError(f"{error}; {_leave(plan, settings, commit)}") from error


def _leave(plan: record.Plan, settings: Settings, commit: Mapping[str, Any]) -> str:
    """Write what a store did not take to a folder of this machine, and say how to send it."""
    store = JsonStore(settings.rootdir / _LEFT, plan.write[0].device)
    store.merge(plan.write, commit_info=commit)
    count = f"{len(plan.write)} {'entry is' if len(plan.write) == 1 else 'entries are'}"
    send = f"pytest-cudagraph baseline merge {_LEFT} -o {without_credentials(settings.baseline)}"
    return f"{count} in {_LEFT}/{store.path.name}: send with {send}"


def _expected(
    saved: Mapping[Key, SavedBatch], reports: Sequence[GraphReport], collected: CollectedTests, root: Path
) -> dict[Key, SavedBatch]:
    """The saved entries that a complete run must have measured if their tests and batch sizes still exist.

    A file that exists and was not collected may hold any test, and a test outside of the collected folders any name. A
    model that ran with exactly the sizes of the command line may have more without them.
    """
    files, sizes = {name: name.partition("::")[0] for name, _ in saved}, collected.given_sizes
    if any(file not in collected.files and _is_file(root / file) for file in files.values()):
        return {}
    below = {file for path in collected.paths for file in files.values() if f"{file}/".startswith(f"{path}/")}
    narrowed = {each.name for each in reports if sizes and {batch.batch_size for batch in each.batches} == sizes}
    return {
        key: entry
        for key, entry in saved.items()
        if ("." in collected.paths or files[key[0]] in below) and (key[0] not in narrowed or key[1] in sizes)
    }


def _is_file(path: Path) -> bool:
    # A name may be longer than any file's. That is an error, not an answer.
    with contextlib.suppress(OSError):
        return path.is_file()
    return False


def _now() -> str:
    """The date and the time as documents and baselines have them."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _path_text(path: AnyPath, root: Path) -> str:
    """A path of this machine from ``root``, another one whole."""
    if isinstance(path, Path) and path.is_relative_to(root):
        return path.relative_to(root).as_posix()
    return str(path)
