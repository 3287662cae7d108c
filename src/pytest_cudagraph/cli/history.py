"""``pytest-cudagraph history``: when each side of the saved entries moved."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable
from pathlib import Path

from pytest_cudagraph import baseline, report
from pytest_cudagraph.baseline.change_points import LEAST_CHANGE, EntryHistory, entry_histories, revisions_of
from pytest_cudagraph.cli.compare import fraction_argument
from pytest_cudagraph.cli.output import CommandOutput, write_page
from pytest_cudagraph.errors import CudagraphError
from pytest_cudagraph.units import plural

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
    found = {str(path): revisions_of(path) for path in paths}
    entries = {path: entry_histories(each.entries, least_change=arguments.least_change) for path, each in found.items()}
    shown = _named(entries, arguments.name)
    lines: list[str] = []
    for path, own in shown.items():
        revisions = found[path]
        lines += [f"{path}: {plural(revisions.commits, 'revision')}", *revisions.notes]
        lines += report.history_lines(own, sessions=arguments.name is not None)
    if arguments.html is not None:
        notes = [note for path in shown for note in found[path].notes]
        write_page(arguments.html, report.history_page(shown, notes))
        lines.append(f"wrote {arguments.html}")
    return CommandOutput(lines=lines)


def _named(entries: dict[str, list[EntryHistory]], name: str | None) -> dict[str, list[EntryHistory]]:
    """The entries of this name, else those that contain it. All without a name."""
    if name is None:
        return entries
    known = {entry.name for own in entries.values() for entry in own}
    wanted = {name} & known or {each for each in known if name in each}
    if not wanted:
        raise CudagraphError(_unknown(name, known))
    chosen = {path: [entry for entry in own if entry.name in wanted] for path, own in entries.items()}
    return {path: own for path, own in chosen.items() if own}


def _unknown(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    return f"no saved entry has a name with {name}{hint} (baseline show lists all)"
