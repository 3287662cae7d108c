"""``pytest-cudagraph baseline``: list, show and prune baseline files."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from pytest_cudagraph import baseline, report
from pytest_cudagraph.cli.output import CommandOutput, baseline_files, entries_of, kernels_text
from pytest_cudagraph.report import Column
from pytest_cudagraph.units import factor_text, latency_text
from pytest_cudagraph.values import SavedBatch

_FOLDER = Path(".cudagraph")

_LISTED = ("file", "device", "tests", "entries", "saved")

_SHOWN = ("batch", "eager", "compiled", "replay", "speedup", "kernels", "saved")


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add ``list``, ``show`` and ``prune``."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("list", help="the baseline files of a folder")
    command.add_argument("folder", type=Path, nargs="?", default=_FOLDER, metavar="DIR", help=f"default: {_FOLDER}")
    command.set_defaults(run=_list)
    command = commands.add_parser("show", help="the entries of a baseline file")
    command.add_argument("file", metavar="FILE|NAME", help=f"a path, or the name of a device in {_FOLDER}")
    command.set_defaults(run=_show)
    command = commands.add_parser("prune", help="remove entries by the names of their tests")
    command.add_argument("folder", type=Path, nargs="?", default=_FOLDER, metavar="DIR", help=f"default: {_FOLDER}")
    command.add_argument("--name", nargs="+", required=True, metavar="GLOB", help="* and ? are wildcards")
    command.set_defaults(run=_prune)


def _list(arguments: argparse.Namespace) -> CommandOutput:
    files = baseline_files(arguments.folder)
    if not files:
        return CommandOutput(lines=[f"no baseline in {arguments.folder}"])
    columns = [Column(title=title, right=title in ("tests", "entries")) for title in _LISTED]
    return CommandOutput(lines=report.grid(columns, [_listed(path) for path in files]))


def _listed(path: Path) -> list[str]:
    entries = entries_of(path)
    devices = sorted({entry.device.name for entry in entries.values()})
    tests = len({name for name, _ in entries})
    newest = max(entry.saved_at for entry in entries.values())
    return [path.name, ", ".join(devices), str(tests), str(len(entries)), newest[:10]]


def _show(arguments: argparse.Namespace) -> CommandOutput:
    path = Path(arguments.file)
    if not path.is_file() and path.name == arguments.file:
        path = _FOLDER / f"{arguments.file.removesuffix('.json')}.json"
    entries = entries_of(path)
    columns = [Column(title="test", right=False), *(Column(title=title) for title in _SHOWN)]
    devices = sorted({report.device_text(entry.device) for entry in entries.values()})
    rows = [_shown(entries[key]) for key in sorted(entries)]
    return CommandOutput(lines=[str(path), *devices, *report.grid(columns, rows)])


def _shown(entry: SavedBatch) -> list[str]:
    return [
        entry.name,
        str(entry.batch_size),
        latency_text(entry.eager.median_ns),
        latency_text(entry.compiled.median_ns) if entry.compiled else "-",
        latency_text(entry.replay.median_ns),
        factor_text(entry.speedup.estimate),
        kernels_text(entry.kernels),
        entry.saved_at[:10],
    ]


def _prune(arguments: argparse.Namespace) -> CommandOutput:
    lines = []
    files = {path: entries_of(path) for path in baseline_files(arguments.folder)}
    names = {name for entries in files.values() for name, _ in entries}
    # An exact name means that entry, even if it contains a star.
    plain = names.intersection(arguments.name)
    globs = [glob for glob in arguments.name if glob not in plain]
    for path, entries in files.items():
        doomed = sorted(key for key in entries if key[0] in plain or _matches(key[0], globs))
        baseline.remove_from(path, doomed)
        lines += [f"removed from {path}: {name}, batch {batch_size}" for name, batch_size in doomed]
    return CommandOutput(lines=lines or [f"removed nothing: no entry in {arguments.folder} has such a name"])


def _matches(name: str, globs: Sequence[str]) -> bool:
    # Brackets are part of the names of parametrised tests, and never a set of characters.
    return any(fnmatchcase(name, glob.replace("[", "[[]")) for glob in globs)
