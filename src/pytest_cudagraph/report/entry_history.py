"""What ``pytest-cudagraph history`` says: when each side of an entry moved, as lines and as an HTML page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytest_cudagraph.baseline.change_points import EntryHistory, KernelChange, Move
from pytest_cudagraph.report.columns import MAX_WIDTH, Column, grid, wrapped
from pytest_cudagraph.report.plots import trend_plot
from pytest_cudagraph.report.rendering import drawn, rendered
from pytest_cudagraph.units import latency_text, plural, signed_text
from pytest_cudagraph.values import Table

_MOVES = [
    Column(title=title, right=title not in ("date", "commit", "side"))
    for title in ("date", "commit", "side", "before", "after", "change", "90 % interval")
]

_SESSIONS = [
    Column(title=title, right=title in ("replay", "reference"))
    for title in ("date", "commit", "replay", "reference", "software")
]


def history_lines(entries: Sequence[EntryHistory], *, sessions: bool) -> list[str]:
    """The moves of each entry. With ``sessions`` also its sessions, and entries that did not move."""
    lines: list[str] = []
    shown = [entry for entry in entries if sessions or _rows(entry)]
    for entry in shown:
        lines.append(f"{_title(entry)}: {_extent(entry)}")
        lines += [f"  {line}" for line in _moves_grid(entry)]
        lines += [f"  {line}" for line in grid(_SESSIONS, _session_rows(entry))] if sessions else []
    moved = sum(bool(_rows(entry)) for entry in entries)
    return [*lines, f"{moved} of {len(entries)} entries moved"]


def _title(entry: EntryHistory) -> str:
    return f"{entry.name}, batch {entry.batch_size}"


def _extent(entry: EntryHistory) -> str:
    first, last = entry.sessions[0].date, entry.sessions[-1].date
    return f"{plural(len(entry.sessions), 'session')}, {first if first == last else f'{first} to {last}'}"


def _moves_grid(entry: EntryHistory) -> Iterator[str]:
    """The table of the moves, with changed software below its row."""
    rows = _rows(entry)
    if not rows:
        return
    title, *lines = grid(_MOVES, [cells for cells, _ in rows])
    yield title
    for line, (_, note) in zip(lines, rows, strict=True):
        yield line
        yield from wrapped(note, MAX_WIDTH - 2, indent="  ") if note else ()


def _rows(entry: EntryHistory) -> list[tuple[list[str], str]]:
    """The cells of each move and what changed with it, oldest first."""
    moves = [(each.after.date, _move_cells(each), _beside(each)) for each in entry.moves]
    kernels = [(each.after.date, _kernel_cells(each), "") for each in entry.kernel_changes]
    return [(cells, note) for _, cells, note in sorted([*kernels, *moves], key=lambda row: row[0])]


def _move_cells(move: Move) -> list[str]:
    change = move.change
    low, high = change.log_ratio - change.margin_log, change.high_log
    return [
        move.after.date,
        move.after.commit or "-",
        move.side,
        latency_text(change.before_ns),
        latency_text(change.after_ns),
        signed_text(math.exp(change.log_ratio)),
        f"{signed_text(math.exp(low))} to {signed_text(math.exp(high))}",
    ]


def _kernel_cells(change: KernelChange) -> list[str]:
    before, after = change.kernels
    counts = [str(before), str(after), f"{after - before:+d}", "exact"]
    return [change.after.date, change.after.commit or "-", "kernels", *counts]


def _beside(move: Move) -> str:
    """What moved with it. The change is relative to the machine, so that the latencies alone do not give it."""
    notes = [_software_change(move)]
    if move.change.reference_ns is not None:
        before_ns, after_ns = move.change.reference_ns
        moved = signed_text(after_ns / before_ns)
        notes.insert(
            0, f"relative to the machine, which moved by {moved}" if abs(after_ns / before_ns - 1) > 0.005 else ""
        )
    return "; ".join(note for note in notes if note)


def _software_change(move: Move) -> str:
    """``torch 2.11.0 -> torch 2.13.0``: only what differs."""
    before, after = (each.software.split(", ") for each in (move.before, move.after))
    old, new = [part for part in before if part not in after], [part for part in after if part not in before]
    return f"{', '.join(old)} -> {', '.join(new)}" if old or new else ""


def _session_rows(entry: EntryHistory) -> list[list[str]]:
    return [
        [
            each.date,
            each.commit or "-",
            latency_text(each.median_ns),
            "-" if each.reference_median_ns is None else latency_text(each.reference_median_ns),
            each.software,
        ]
        for each in entry.sessions
    ]


def history_page(files: Mapping[str, Sequence[EntryHistory]], notes: Sequence[str]) -> str:
    """The same as an HTML page, by file. Raises :class:`~pytest_cudagraph.errors.CudagraphError` without jinja2."""
    moves = [
        [*([path] if len(files) > 1 else []), entry.name, str(entry.batch_size), *cells, note]
        for path, entries in files.items()
        for entry in entries
        for cells, note in _rows(entry)
    ]
    about = [Column(title=title, right=title == "batch") for title in ("file", "test", "batch")]
    about = about if len(files) > 1 else about[1:]
    table = Table(
        title="moves", columns=(*about, *_MOVES, Column(title="software", right=False)), rows=tuple(map(tuple, moves))
    )
    shown = [_shown(path, entry) for path, entries in files.items() for entry in entries]
    counted = f"{plural(len(moves), 'move')} in {plural(len(shown), 'saved batch')}"
    return rendered("history.html", {
        "title": f"CUDA graphs: history, {counted}", "counted": counted, "notes": notes, "moves": table,
        "entries": shown,
    })  # fmt: skip


def _shown(path: str, entry: EntryHistory) -> dict[str, Any]:
    sides = {side: [[each.median_ns for each in part] for part in parts] for side, parts in entry.sides.items()}
    return {
        "title": _title(entry),
        "extent": f"{_extent(entry)}, {path}",
        "moved": bool(_rows(entry)),
        "plots": [(side, drawn(trend_plot(parts, side))) for side, parts in sides.items() if parts],
        "sessions": Table(
            title=f"sessions of {_title(entry)}", columns=tuple(_SESSIONS), rows=tuple(map(tuple, _session_rows(entry)))
        ),
    }
