"""``pytest-cudagraph baseline`` and ``compare``: list, show, prune and compare baseline files."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pytest_cudagraph import baseline, files, gate, record, report
from pytest_cudagraph.baseline import AnyPath
from pytest_cudagraph.cli.output import FINE, INCONCLUSIVE, REGRESSION, CommandOutput
from pytest_cudagraph.errors import BaselineError, CudagraphError
from pytest_cudagraph.report import Column
from pytest_cudagraph.report.columns import MAX_WIDTH
from pytest_cudagraph.settings.parsing import fraction
from pytest_cudagraph.units import NS_PER_S, factor_text, latency_text, percent_text
from pytest_cudagraph.values import Latency, SavedBatch

_FOLDER = Path(".cudagraph")

_NOT_JOINED = "as its kernels, software, hardware or speed differ"

_LISTED = ("file", "device", "tests", "entries", "saved")

_COMPARED = ("batch", "old", "new", "change", "eager change", "kernels")

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
    command.add_argument("folder", nargs="?", default=str(_FOLDER), metavar="DIR|URL", help=f"default: {_FOLDER}")
    command.add_argument("--name", nargs="+", required=True, metavar="GLOB", help="* and ? are wildcards")
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
    entries = _entries_of(path)
    devices = sorted({entry.device.name for entry in entries.values()})
    tests = len({name for name, _ in entries})
    newest = max(entry.saved_at for entry in entries.values())
    return [path.name, ", ".join(devices), str(tests), str(len(entries)), newest[:10]]


def _show(arguments: argparse.Namespace) -> CommandOutput:
    path = baseline.any_path(arguments.file)
    if path.name == arguments.file and not path.exists():
        path = _FOLDER / f"{arguments.file.removesuffix('.json')}.json"
    entries = _entries_of(path)
    columns = [Column(title="test", right=False), *(Column(title=title) for title in _SHOWN)]
    devices = sorted({report.device_text(entry.device) for entry in entries.values()})
    shown = [entries[key] for key in sorted(entries)]
    title, *rows = report.grid(columns, [_shown(entry) for entry in shown])
    lines = [line for entry, row in zip(shown, rows, strict=True) for line in (row, *_figures(entry))]
    return CommandOutput(lines=[str(path), *devices, title, *lines])


def _figures(entry: SavedBatch) -> list[str]:
    """``tokens/s 1830, TTFT 772.6 µs, ITL 145.9 µs`` of the last session, below the entry of a generation."""
    found = baseline.history(entry)[-1].figures
    words = [_figure_text(name, figure.median_ns) for name, figure in found.items()]
    return [f"  {', '.join(words)}"] if words else []


def _figure_text(name: str, median_ns: float) -> str:
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
        _kernels_text(entry.kernels),
        entry.saved_at[:10],
    ]


def _prune(arguments: argparse.Namespace) -> CommandOutput:
    lines = []
    folder = baseline.any_path(arguments.folder)
    files = {path: _entries_of(path) for path in _baseline_files(folder)}
    names = {name for entries in files.values() for name, _ in entries}
    # An exact name means that entry, even if it contains a star.
    plain = names.intersection(arguments.name)
    globs = [glob for glob in arguments.name if glob not in plain]
    for path, entries in files.items():
        doomed = sorted(key for key in entries if key[0] in plain or _matches(key[0], globs))
        baseline.remove_from(path, doomed)
        lines += [f"removed from {path}: {name}, batch {batch_size}" for name, batch_size in doomed]
    return CommandOutput(lines=lines or [f"removed nothing: no entry in {folder} has such a name"])


def _matches(name: str, globs: Sequence[str]) -> bool:
    # Brackets are part of the names of parametrised tests, and never a set of characters.
    return any(fnmatchcase(name, glob.replace("[", "[[]")) for glob in globs)


def _merge(arguments: argparse.Namespace) -> CommandOutput:
    # All are read before the first is written.
    inputs, output = map(baseline.any_path, arguments.inputs), baseline.any_path(arguments.output)
    paths = [path for given in inputs for path in (_baseline_files(given) if given.is_dir() else [given])]
    contents = [_content_of(path) for path in paths]
    found = [(entry, content.commit_info) for content in contents for entry in content.entries.values()]
    stores = {store.path: store for store in (baseline.JsonStore(output, entry.device) for entry, _ in found)}
    lines = []
    for path, store in sorted(stores.items()):
        own = [each for each in found if baseline.slug(each[0].device) == path.stem]
        _, commit_info = max(own, key=lambda each: each[0].saved_at)
        replaced = store.merge([entry for entry, _ in own], commit_info=commit_info)
        count = len(store.load())
        lines.append(f"wrote {path}: {count} {'entry' if count == 1 else 'entries'}")
        lines += [f"  {name}, batch {size}: only the newest, {_NOT_JOINED}" for name, size in replaced]
    return CommandOutput(lines=lines or ["merged nothing: no folder holds a baseline"])


def add_compare(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``compare``."""
    parser.add_argument("old", metavar="A", help="the old baseline file, or the old --cudagraph-json document")
    parser.add_argument("new", metavar="B", help="the new one of either kind")
    parser.add_argument(
        "--fail-on",
        choices=("slower", "kernels", "any"),
        default="slower",
        help="exit with 1 if a replay is slower (default), has more kernels, or either",
    )
    parser.add_argument(
        "--max-slowdown",
        type=_fraction,
        default=0.10,
        metavar="F",
        help="the allowed slowdown of a replay (default: 0.10, 10 %%)",
    )
    parser.add_argument("--strict", action="store_true", help="exit with 2 if an entry could not be judged")
    parser.set_defaults(run=_compare)


def _fraction(text: str) -> float:
    try:
        return fraction()(text)
    except ValueError as allowed:
        raise argparse.ArgumentTypeError(f"{text} is not {allowed}") from None


def _compare(arguments: argparse.Namespace) -> CommandOutput:
    paths = [baseline.any_path(text) for text in (arguments.old, arguments.new)]
    old, new = map(_entries_of, paths)
    changes = record.compare(old, new, max_slowdown=arguments.max_slowdown)
    columns = [Column(title="test", right=False), *(Column(title=title) for title in _COMPARED)]
    title, *rows = report.grid([*columns, Column(title="verdict", right=False)], [_compared(each) for each in changes])
    lines = [" -> ".join(map(str, paths)), title]
    for change, row in zip(changes, rows, strict=True):
        lines += [row, *_kernel_lines(change), *_figure_lines(change), *_why_uncertain(change, arguments.max_slowdown)]
    counted = Counter(_verdict(change) for change in changes)
    words = [f"{count} {word}" for word, count in sorted(counted.items())]
    others = sum(bool(_kernel_lines(change)) for change in changes)
    lines.append(", ".join([*words, f"{others} with other kernels"] if others else words))
    return CommandOutput(lines=lines, exit_code=_exit_code(changes, arguments.fail_on, strict=arguments.strict))


def _compared(change: record.EntryChange) -> list[str]:
    old, new = change.old, change.new
    sides = (old, new) if old and new and change.comparison != "not-comparable" else None
    return [
        change.name,
        str(change.batch_size),
        latency_text(old.replay.median_ns) if old else "-",
        latency_text(new.replay.median_ns) if new else "-",
        _moved(*(side.replay for side in sides)) if sides else "-",
        _moved(*(side.eager for side in sides)) if sides else "-",
        _kernels(change),
        _verdict(change),
    ]


def _moved(old: Latency, new: Latency) -> str:
    text = percent_text(new.median_ns / old.median_ns - 1)
    return text if text.startswith("-") else f"+{text}"


def _verdict(change: record.EntryChange) -> str:
    return change.comparison.replace("-", " ")


def _kernels(change: record.EntryChange) -> str:
    if change.added_kernels and change.old and change.new:
        return f"{change.old.kernels} -> {change.new.kernels}"
    present = change.new or change.old
    return _kernels_text(present.kernels if present else None)


def _kernel_lines(change: record.EntryChange) -> list[str]:
    """``+16 `aten.mul`, -1 `aten.silu```: the changed kernel counts; no line without a change."""
    if change.old is None or change.new is None:
        return []
    before, after = Counter(change.old.kernel_names), Counter(change.new.kernel_names)
    moved = [(name, after[name] - before[name]) for name in sorted({*before, *after})]
    words = [f"{count:+d} `{name}`" for name, count in moved if count]
    return [f"  {', '.join(words)}"] if words else []


def _figure_lines(change: record.EntryChange) -> list[str]:
    """``TTFT 1.2 -> 1.8 ms (+50 %)``: each figure of generations that both have."""
    if change.old is None or change.new is None or change.comparison == "not-comparable":
        return []
    found = baseline.figure_changes(change.old, baseline.history(change.new)[-1])
    words = [
        f"{_figure_text(name, each.before_ns)} -> {_figure_text(name, each.after_ns).split(' ', 1)[1]}"
        for name, each in found.items()
    ]
    return [f"  {', '.join(words)}"] if words else []


def _why_uncertain(change: record.EntryChange, max_slowdown: float) -> list[str]:
    """The reason in the words of the gate, which has the same bound."""
    if change.comparison != "uncertain" or change.old is None or change.new is None:
        return []
    found = baseline.change(change.old, baseline.history(change.new)[-1])
    interval = f"{gate.change_interval_text(found)}, {percent_text(max_slowdown)} is allowed"
    return textwrap.wrap(
        f"{interval}; {gate.sessions_text(found)}", MAX_WIDTH, initial_indent="  ", subsequent_indent="    "
    )


def _exit_code(changes: Sequence[record.EntryChange], fail_on: str, *, strict: bool) -> int:
    slower = any(change.comparison == "slower" for change in changes)
    kernels = any((change.added_kernels or 0) > 0 for change in changes)
    if (slower and fail_on in ("slower", "any")) or (kernels and fail_on in ("kernels", "any")):
        return REGRESSION
    unclear = any(change.comparison not in ("same", "faster", "slower") for change in changes)
    return INCONCLUSIVE if strict and unclear else FINE


def _baseline_files(folder: AnyPath) -> list[AnyPath]:
    """The baseline files of a folder. Raises :class:`~pytest_cudagraph.errors.CudagraphError` if it is no folder."""
    if not folder.is_dir():
        raise CudagraphError(f"{folder} is not a folder")
    return baseline.json_files(folder)


def _entries_of(path: AnyPath) -> dict[baseline.Key, SavedBatch]:
    """The entries of a baseline file, or what a document measured.

    Raises :class:`~pytest_cudagraph.errors.CudagraphError`, also for a missing file.
    """
    if isinstance(path, Path) and path.is_file():
        with suppress(OSError, ValueError):
            found = json.loads(files.read_text(path))
            if isinstance(found, dict) and found.keys() >= {"schema", "tests"}:
                return _measured(found, path)
    return dict(_content_of(path).entries)


def _measured(document: dict[str, Any], path: Path) -> dict[baseline.Key, SavedBatch]:
    try:
        return report.entries_of_document(document)
    except ValueError as exc:
        raise CudagraphError(f"{path}: {exc}") from exc


def _content_of(path: AnyPath) -> baseline.Content:
    if not path.exists():
        raise BaselineError(f"{path}: no such file")
    return baseline.read(path)


def _kernels_text(kernels: int | None) -> str:
    """The count, or ``-`` if the backend could not count."""
    return "-" if kernels is None else str(kernels)
