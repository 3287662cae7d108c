"""``pytest-cudagraph history``: when each side of the saved entries moved, as lines and as an HTML page."""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_cudagraph import baseline
from pytest_cudagraph.baseline.change_points import (
    LEAST_CHANGE,
    EntryHistory,
    KernelChange,
    Move,
    entry_histories,
    revisions_of,
)
from pytest_cudagraph.cli.compare import fraction_argument
from pytest_cudagraph.cli.output import CommandOutput, write_page
from pytest_cudagraph.errors import CudagraphError
from pytest_cudagraph.report.columns import text_of
from pytest_cudagraph.report.page import rendered
from pytest_cudagraph.report.plots import drawn, trend_plot
from pytest_cudagraph.units import latency_text, plural, signed_text, span_text
from pytest_cudagraph.values import Column, Table

_FOLDER = ".cudagraph"


def add_command(command: argparse.ArgumentParser) -> None:
    """``history [NAME] [--baseline DIR] [--least-change F] [--html PAGE]``."""
    command.add_argument("name", nargs="?", metavar="NAME", help="tests whose name is or contains this; default: all")
    command.add_argument("--baseline", default=_FOLDER, metavar="DIR|URL", help=f"default: {_FOLDER}")
    command.add_argument(
        "--least-change",
        type=fraction_argument,
        default=LEAST_CHANGE,
        metavar="F",
        help="the least change that is shown (default: 0.02, 2 %%)",
    )
    command.add_argument("--html", type=Path, metavar="PAGE", help="also write the history as an HTML page")
    command.set_defaults(run=_history)


def _history(arguments: argparse.Namespace) -> CommandOutput:
    folder = baseline.any_path(arguments.baseline)
    if not folder.is_dir() or not (paths := baseline.json_files(folder)):
        raise CudagraphError(f"no baseline in {folder}: pytest --cudagraph --cudagraph-update saves one")
    files = {str(path): revisions_of(path) for path in paths}
    entries = {path: entry_histories(file.entries, least_change=arguments.least_change) for path, file in files.items()}
    shown = _named(entries, arguments.name)
    lines: list[str] = []
    for path, held in shown.items():
        lines += [f"{path}: {plural(files[path].commits, 'revision')}", *files[path].notes]
        lines += _history_lines(held, sessions=arguments.name is not None)
    if arguments.html is not None:
        notes = [note for path in shown for note in files[path].notes]
        write_page(arguments.html, _history_page(shown, notes))
        lines.append(f"wrote {arguments.html}")
    return CommandOutput(lines=lines)


def _named(entries: dict[str, list[EntryHistory]], name: str | None) -> dict[str, list[EntryHistory]]:
    """The entries of this name, else those that contain it. All without a name."""
    if name is None:
        return entries
    known = {entry.name for held in entries.values() for entry in held}
    wanted = {name} & known or {each for each in known if name in each}
    if not wanted:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        hint = f"; nearest: {', '.join(near)}" if near else ""
        raise CudagraphError(f"no saved entry has a name with {name}{hint} (baseline show lists all)")
    chosen = {path: [entry for entry in held if entry.name in wanted] for path, held in entries.items()}
    return {path: held for path, held in chosen.items() if held}


_NUMBERS = ("batch", "before", "after", "change", "90 % interval", "replay", "reference")


def _columns(*titles: str) -> tuple[Column, ...]:
    return tuple(Column(title=title, right=title in _NUMBERS) for title in titles)


_MOVES = _columns("date", "commit", "side", "before", "after", "change", "90 % interval")


def _history_lines(entries: Sequence[EntryHistory], *, sessions: bool) -> list[str]:
    """The moves of each entry. With ``sessions`` also its sessions, and entries that did not move."""
    lines, moved = list[str](), 0
    for entry in entries:
        moves = _moves(entry)
        moved += bool(moves.rows)
        tables = [table for table in (moves, *([_sessions(entry)] if sessions else [])) if table.rows]
        lines += [f"{_title(entry)}: {_extent(entry)}"] if tables else []
        lines += [f"  {line}" for table in tables for line in text_of(table)[1:]]
    return [*lines, f"{moved} of {len(entries)} entries moved"]


def _title(entry: EntryHistory) -> str:
    return f"{entry.name}, batch {entry.batch_size}"


def _extent(entry: EntryHistory) -> str:
    first, last = entry.sessions[0].date, entry.sessions[-1].date
    return f"{plural(len(entry.sessions), 'session')}, {first if first == last else f'{first} to {last}'}"


def _moves(entry: EntryHistory) -> Table:
    """Each move, oldest first, with changed software below its row."""
    moves = [(_move_cells(each), _beside(each)) for each in entry.moves]
    rows = sorted([*((_kernel_cells(each), "") for each in entry.kernel_changes), *moves], key=lambda row: row[0][0])
    return Table(
        title="moves",
        columns=_MOVES,
        rows=tuple(tuple(cells) for cells, _ in rows),
        remarks=tuple((note,) if note else () for _, note in rows),
    )


def _move_cells(move: Move) -> list[str]:
    change = move.change
    return [
        move.after.date,
        move.after.commit or "-",
        move.side,
        latency_text(change.before_ns),
        latency_text(change.after_ns),
        signed_text(math.exp(change.log_ratio)),
        span_text(math.exp(change.low_log), math.exp(change.high_log)),
    ]


def _kernel_cells(change: KernelChange) -> list[str]:
    before, after = change.kernels
    counts = [str(before), str(after), f"{after - before:+d}", "exact"]
    return [change.after.date, change.after.commit or "-", "kernels", *counts]


def _beside(move: Move) -> str:
    """What moved with it. The change is relative to the machine, so that the latencies alone do not give it."""
    notes = []
    if move.change.reference_ns is not None:
        before_ns, after_ns = move.change.reference_ns
        if abs(after_ns / before_ns - 1) > 0.005:
            notes.append(f"relative to the machine, which moved by {signed_text(after_ns / before_ns)}")
    before, after = (session.software.split(", ") for session in (move.before, move.after))
    old, new = [part for part in before if part not in after], [part for part in after if part not in before]
    if old or new:
        notes.append(f"{', '.join(old)} -> {', '.join(new)}")
    return "; ".join(notes)


def _sessions(entry: EntryHistory) -> Table:
    rows = [
        (
            each.date,
            each.commit or "-",
            latency_text(each.median_ns),
            "-" if each.reference_median_ns is None else latency_text(each.reference_median_ns),
            each.software,
        )
        for each in entry.sessions
    ]
    columns = _columns("date", "commit", "replay", "reference", "software")
    return Table(title=f"sessions of {_title(entry)}", columns=columns, rows=tuple(rows))


def _history_page(files: Mapping[str, Sequence[EntryHistory]], notes: Sequence[str]) -> str:
    """The same as an HTML page, by file. Raises :class:`~pytest_cudagraph.errors.CudagraphError` without jinja2."""
    moves = _all_moves(files)
    shown = [_shown(path, entry) for path, entries in files.items() for entry in entries]
    counted = f"{plural(len(moves.rows), 'move')} in {plural(len(shown), 'saved batch')}"
    return rendered("history.html", {
        "title": f"CUDA graphs: history, {counted}", "counted": counted, "notes": notes, "moves": moves,
        "entries": shown,
    })  # fmt: skip


def _all_moves(files: Mapping[str, Sequence[EntryHistory]]) -> Table:
    """One table for all entries, which can be sorted. The file is named where there are several."""
    rows, number = list[tuple[str, ...]](), 0 if len(files) > 1 else 1
    for path, entries in files.items():
        for entry in entries:
            table = _moves(entry)
            about = (path, entry.name, str(entry.batch_size))[number:]
            rows += [(*about, *cells, "".join(note)) for cells, note in zip(table.rows, table.remarks, strict=True)]
    columns = _columns("file", "test", "batch")[number:]
    return Table(title="moves", columns=(*columns, *_MOVES, *_columns("software")), rows=tuple(rows))


def _shown(path: str, entry: EntryHistory) -> dict[str, Any]:
    sides = {side: [[each.median_ns for each in part] for part in parts] for side, parts in entry.sides.items()}
    return {
        "title": _title(entry),
        "extent": f"{_extent(entry)}, {path}",
        "moved": bool(_moves(entry).rows),
        "plots": [(side, drawn(trend_plot(parts, side))) for side, parts in sides.items() if parts],
        "sessions": _sessions(entry),
    }
