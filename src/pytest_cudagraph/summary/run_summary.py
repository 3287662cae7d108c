"""The end of a run: each file and each part of the summary is made by itself, so that an error loses no other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_cudagraph import environment, files, report
from pytest_cudagraph.baseline import AnyPath, Key
from pytest_cudagraph.foreign import message_of, printable, printable_lines
from pytest_cudagraph.gpu_locks import measured_on
from pytest_cudagraph.settings.options import Settings
from pytest_cudagraph.summary.saved_entries import CollectedTests, SummaryLines, end_device, now
from pytest_cudagraph.summary.saved_entries import shown as shown_path
from pytest_cudagraph.values import Addition, DeviceInfo, GraphReport, ReportColumn, SavedBatch, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The summary of a run. ``failed``: the exit status is non-zero even if no test failed."""

    table: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    failed: bool = False


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
            end_device(device, own_reports, collected, settings, summary, (saved or {}).get(device))
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


def _devices(reports: Iterable[GraphReport]) -> list[DeviceInfo]:
    return list(dict.fromkeys(each.device for each in reports if each.device is not None))


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
        reports, device, settings, additions, workloads, tables=tables, date=now(), commit=commit
    )
    if settings.json:
        _write("--cudagraph-json", settings.json, folder, lambda: report.json_text(document), summary)
    if settings.html:
        # Read back: the command makes the same page of the file later.
        written = _write(
            "--cudagraph-html", settings.html, folder, lambda: report.page(report.run_of_document(document)), summary
        )
        summary.lines += [f"wrote the page {shown_path(folder / settings.html, folder)}"] if written else []


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


def header_line(device: DeviceInfo, baseline_file: AnyPath, settings: Settings, *, judged: bool) -> str:
    """What this run measures on, its baseline file and its least speedup."""
    shown = shown_path(baseline_file, settings.rootdir) if settings.uses_baseline else "off"
    return printable(report.header(device, baseline=shown, min_speedup=settings.min_speedup, judged=judged))
