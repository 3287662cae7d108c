"""What GitHub Actions shows of a run: the step summary, and the annotation of a failing test.

Names are in blocks of HTML, in which GitHub reads no Markdown. So ``html.escape`` is enough to show them as text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from pytest_cudagraph.foreign import printable, printable_lines
from pytest_cudagraph.report.columns import scenario_tables, text_of
from pytest_cudagraph.report.failure import failure_text
from pytest_cudagraph.report.table import UNTIMED, Row, by_device, cells_of, columns_of, rows_of
from pytest_cudagraph.values import GraphReport, Site, Verdict

STEP_SUMMARY_BYTES = 1 << 20
"""GitHub shows no summary of a step that is larger."""

_MOST = 4096
"""Characters of one failure. GitHub's runner cuts the message of an annotation there."""


def step_summary(reports: Iterable[GraphReport], closing: Sequence[str], *, room_bytes: int, is_strict: bool) -> str:
    """The run as Markdown of at most ``room_bytes``: failures, what moved, the tables, the ``closing`` lines.

    If not all models fit, the worst ones are shown, and a sentence says so. Empty if not even that sentence fits.
    """
    ranked = sorted(reports, key=lambda report: -report.verdict.severity)
    shown = len(ranked)
    while shown >= 0:
        left_out = f"{shown} of {len(ranked)} models are shown, the worst first" if shown < len(ranked) else ""
        text = "\n\n".join(_parts(ranked[:shown], closing, left_out, is_strict=is_strict)) + "\n"
        size = len(text.encode())
        if size <= room_bytes:
            return text
        shown = min(shown - 1, int(shown * room_bytes / size))
    return ""


def _parts(reports: Sequence[GraphReport], closing: Sequence[str], left_out: str, *, is_strict: bool) -> Iterator[str]:
    yield "\n## CUDA graphs"
    if left_out:
        yield f"{left_out}: GitHub shows at most 1 MiB for a step. `--cudagraph-json` writes all."
    missed = [each for each in reports if each.verdict.fails or (is_strict and each.verdict is not Verdict.PASSED)]
    if missed:
        yield "### Failed"
        yield from (_failure(each) for each in missed)
    moved = [f"<li>{_plain(line)}</li>" for report in reports for line in _moved(report)]
    if moved:
        yield "### Moved against the baseline"
        yield "\n".join(["<ul>", *moved, "</ul>"])
    for device, own in by_device(reports).items():
        yield f"<h3>{_plain(device)}</h3>"
        yield _table([row for report in own for row in rows_of(report)])
        yield from _text([line for each in scenario_tables(own) if each.in_terminal for line in text_of(each)])
    yield from _text(closing)


def _failure(report: GraphReport) -> str:
    title = f"<summary>{_code(report.name)}: {report.verdict.words}</summary>"
    return "\n\n".join([f"<details open>{title}", *_text([_cut(failure_text(report))]), "</details>"])


def _moved(report: GraphReport) -> Iterator[str]:
    """What the gates of latency and structure found to differ from the saved entry."""
    for batch, row in zip(report.batches, rows_of(report), strict=False):
        reasons = [each.reason for each in batch.judgements if each.gate == "baseline"]
        told = reasons if batch.comparison in ("slower", "faster") else []
        told += [row.note] if row.note and batch.verdict not in UNTIMED else []
        yield from (f"{report.name}, batch {batch.batch_size}: {reason}" for reason in told)


def _table(rows: Sequence[Row]) -> str:
    compiled = any(row.compiled_ns is not None for row in rows)
    titles = "".join(f"<th>{column.title}</th>" for column in columns_of(compiled))
    return "\n".join(["<table>", f"<tr>{titles}</tr>", *(_cells(row, compiled=compiled) for row in rows), "</table>"])


def _cells(row: Row, *, compiled: bool) -> str:
    name, *others = cells_of(row, compiled=compiled, interval=True)
    cells = "".join(f"<td>{_plain(each)}</td>" for each in others)
    return f"<tr><td>{_code(name)}</td>{cells}</tr>"


def _code(text: str) -> str:
    return f"<code>{_plain(text)}</code>"


def _plain(text: str) -> str:
    return escape(printable(text), quote=False)


def _text(lines: Sequence[str]) -> Iterator[str]:
    """Lines as they are on the terminal."""
    if lines:
        yield "\n".join(["<pre>", *(escape(printable_lines(line), quote=False) for line in lines), "</pre>"])


def _cut(text: str) -> str:
    return text if len(text) <= _MOST else f"{text[:_MOST].rstrip()}\n... cut here, the log has the rest"


def sites_of_failure(report: GraphReport) -> Iterator[Site]:
    """The lines of the user's code that made a model fail, the best one first."""
    judgements = [*report.judgements, *(each for batch in report.batches for each in batch.judgements)]
    hazards = {each.hazard for each in judgements if each.verdict.fails}
    for finding in report.findings:
        if finding.level == "error" or finding.id in hazards:
            yield from (site for site in (finding.called_from, finding.site) if site is not None)


def annotation(message: str, *, title: str, file: str, line: int) -> str:
    """A line that GitHub's runner reads in the log and shows at a line of the source.

    The escapes are those of the workflow commands of GitHub Actions: percent signs, line breaks, and in properties
    colons and commas.
    """
    properties = {"file": file, "line": str(line), "title": title}
    shown = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
    return f"::error {shown}::{_data(_cut(printable_lines(message)))}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(printable(text)).replace(":", "%3A").replace(",", "%2C")
