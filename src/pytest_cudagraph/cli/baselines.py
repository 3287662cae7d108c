"""``pytest-cudagraph baseline``: list, show, prune and merge baseline files."""

from __future__ import annotations

import argparse
from fnmatch import fnmatchcase
from pathlib import Path

from pytest_cudagraph import baseline, gate, report
from pytest_cudagraph.baseline import AnyPath
from pytest_cudagraph.cli.output import CommandOutput, content_of, entries_of
from pytest_cudagraph.errors import CudagraphError
from pytest_cudagraph.gc_pause import gc_paused
from pytest_cudagraph.report import Column
from pytest_cudagraph.units import NS_PER_S, factor_text, latency_text, plural
from pytest_cudagraph.values import SavedBatch

_FOLDER = Path(".cudagraph")

_NOT_JOINED = "as its kernels, software, hardware or speed differ"

_LISTED = ("file", "device", "tests", "entries", "saved")

_SHOWN = ("batch", "eager", "compiled", "replay", "speedup", "kernels", "saved")


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add ``list``, ``show`` and ``prune``."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("list", help="the baseline files of a folder")
    command.add_argument("folder", nargs="?", default=str(_FOLDER), metavar="DIR|URL", help=f"default: {_FOLDER}")
    command.set_defaults(run=_list)
    command = commands.add_parser("show", help="the entries of a baseline file")
    command.add_argument("file", metavar="FILE|NAME", help=f"a path, or the name of a device in {_FOLDER}")
    command.set_defaults(run=_show)
    command = commands.add_parser("prune", help="remove entries by the names of their tests")
    command.add_argument("place", nargs="?", default=str(_FOLDER), metavar="DIR|FILE|URL", help=f"default: {_FOLDER}")
    command.add_argument("--name", nargs="+", required=True, metavar="GLOB", help="* and ? are wildcards")
    command.add_argument(
        "--batch-size", nargs="+", type=int, metavar="N", help="only the entries of these batch sizes (default: all)"
    )
    command.set_defaults(run=_prune)
    _add_merge(commands.add_parser("merge", help="join what several jobs recorded"))


def _add_merge(command: argparse.ArgumentParser) -> None:
    command.add_argument("inputs", nargs="+", metavar="FILE|DIR|URL", help="what the jobs recorded")
    command.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="DIR|URL",
        help="where the result goes, joined with what it holds",
    )
    command.set_defaults(run=_merge)


def _list(arguments: argparse.Namespace) -> CommandOutput:
    folder = baseline.any_path(arguments.folder)
    files = _baseline_files(folder)
    if not files:
        return CommandOutput(lines=[f"no baseline in {folder}"])
    columns = [Column(title=title, right=title in ("tests", "entries")) for title in _LISTED]
    return CommandOutput(lines=report.grid(columns, [_listed(path) for path in files]))


def _listed(path: AnyPath) -> list[str]:
    entries = content_of(path).entries
    devices = sorted({entry.device.name for entry in entries.values()})
    tests = len({name for name, _ in entries})
    newest = max(entry.saved_at for entry in entries.values())
    return [path.name, ", ".join(devices), str(tests), str(len(entries)), newest[:10]]


def _show(arguments: argparse.Namespace) -> CommandOutput:
    path = baseline.any_path(arguments.file)
    if path.name == arguments.file and not path.exists():
        path = _FOLDER / f"{arguments.file.removesuffix('.json')}.json"
    entries = entries_of(path)
    columns = [Column(title="test", right=False), *(Column(title=title) for title in _SHOWN)]
    devices = sorted({report.device_text(entry.device) for entry in entries.values()})
    shown = [entries[key] for key in sorted(entries)]
    title, *rows = report.grid(columns, [_shown(entry) for entry in shown])
    lines = []
    for entry, row in zip(shown, rows, strict=True):
        words = [figure_text(name, figure.median_ns) for name, figure in entry.sessions[-1].figures.items()]
        lines += [row, *([f"  {', '.join(words)}"] if words else [])]
    return CommandOutput(lines=[str(path), *devices, title, *lines])


def figure_text(name: str, median_ns: float) -> str:
    """``TTFT 772.6 µs``."""
    if name == "time_per_token":
        return f"tokens/s {NS_PER_S / median_ns:.0f}"
    return f"{gate.FIGURES.get(name, name)} {latency_text(median_ns)}"


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
    place = baseline.any_path(arguments.place)
    files = {path: dict(content_of(path).entries) for path in _files_of(place)}
    names = {name for entries in files.values() for name, _ in entries}
    # An exact name means that entry, even if it contains a star.
    plain = names.intersection(arguments.name)
    # Brackets are part of the names of parametrised tests, and never a set of characters.
    globs = [glob.replace("[", "[[]") for glob in arguments.name if glob not in plain]
    for path, entries in files.items():
        named = sorted(key for key in entries if key[0] in plain or any(fnmatchcase(key[0], glob) for glob in globs))
        doomed = [key for key in named if arguments.batch_size is None or key[1] in arguments.batch_size]
        baseline.remove_from(path, doomed)
        lines += [f"removed from {path}: {name}, batch {batch_size}" for name, batch_size in doomed]
    return CommandOutput(lines=lines or [f"removed nothing: no entry in {place} has such a name and batch size"])


# A garbage collection would visit millions of new objects and free none.
@gc_paused()
def _merge(arguments: argparse.Namespace) -> CommandOutput:
    # All are read before the first is written.
    inputs, output = map(baseline.any_path, arguments.inputs), baseline.any_path(arguments.output)
    if isinstance(output, baseline.RemotePath):
        output.require(may_create=True)
    paths = [path for place in inputs for path in _files_of(place)]
    contents = [content_of(path) for path in paths]
    entries = [(entry, content.commit_info) for content in contents for entry in content.entries.values()]
    stores = {store.path: store for store in (baseline.JsonStore(output, entry.device) for entry, _ in entries)}
    lines = []
    for path, store in sorted(stores.items()):
        of_store = [each for each in entries if baseline.slug(each[0].device) == path.stem]
        _, commit_info = max(of_store, key=lambda each: each[0].saved_at)
        count, replaced = store.merge([entry for entry, _ in of_store], commit_info=commit_info)
        lines.append(f"wrote {path}: {plural(count, 'entry')}")
        lines += [f"  {name}, batch {size}: only the newest, {_NOT_JOINED}" for name, size in replaced]
    return CommandOutput(lines=lines or ["merged nothing: no folder holds a baseline"])


def _baseline_files(folder: AnyPath) -> list[AnyPath]:
    """The baseline files of a folder. Raises :class:`~pytest_cudagraph.errors.CudagraphError` if it is no folder."""
    if isinstance(folder, baseline.RemotePath):
        folder.require(may_create=False)
    if not folder.is_dir():
        raise CudagraphError(f"{folder} is not a folder")
    return baseline.json_files(folder)


def _files_of(place: AnyPath) -> list[AnyPath]:
    """A file, or the baseline files of a folder. Raises :class:`~pytest_cudagraph.errors.CudagraphError`."""
    return _baseline_files(place) if place.is_dir() or not place.exists() else [place]


def kernels_text(kernels: int | None) -> str:
    """The count, or ``-`` if the backend could not count."""
    return "-" if kernels is None else str(kernels)
