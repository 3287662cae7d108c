"""The end of a run: what is written, what is said. Knows no torch, so that an xdist controller need not load it."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pytest_cudagraph import environment, gate, record, report
from pytest_cudagraph.base_revision.judge import base_table
from pytest_cudagraph.baseline import JsonStore, Key, normal_name
from pytest_cudagraph.errors import BaselineError
from pytest_cudagraph.settings.options import Settings
from pytest_cudagraph.values import DeviceInfo, GraphReport, SavedBatch

_NAMED = 5
"""Stale tests named in the command that drops them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedTests:
    """What pytest ran: which tests passed, and whether those were all there are."""

    passed: frozenset[str]
    silent: frozenset[str] = frozenset()
    """Node ids of tests of ours that did not pass as a whole: skipped, failed, never run. They tell nothing."""
    files: frozenset[str] = frozenset()
    """The files that tests were found in, relative to the root directory."""
    finished: bool
    """False after Ctrl-C or an internal error: then nothing is written."""
    complete: bool
    """Whether no test was left out of the files that were looked at."""
    paths: tuple[str, ...]
    """What was looked at: files and folders relative to the root directory, ``.`` for all of it."""
    whole: bool = False
    """Whether that is all that the project runs: the root directory, or its ``testpaths``."""
    asked_sizes: frozenset[int] = frozenset()
    """The batch sizes that the command line asked for; empty where it named none."""
    folder: Path = field(default_factory=Path)
    """Where pytest was called: what ``--cudagraph-json`` is relative to, wherever the tests have gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What a run says at its end. ``failed``: it ends with a non-zero exit status although no test failed."""

    lines: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    failed: bool = False


@dataclass(slots=True)
class _SummaryLines:
    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def end_run(reports: Sequence[GraphReport], collected: CollectedTests, settings: Settings) -> RunSummary:
    """Write what may be written, and say all that is to be said.

    A file that cannot be written is a problem of the run, never an exception: the other files are still written.
    """
    said = _SummaryLines(lines=report.table(reports) if reports else [])
    for device in _devices(reports):
        _end_device(device, [each for each in reports if each.device == device], collected, settings, said)
    said.lines += base_table(reports)
    if settings.suggest:
        said.lines += report.suggestions(reports)
    if settings.json:
        _write_document(collected.folder / settings.json, reports, settings, said)
    return RunSummary(lines=tuple(said.lines), problems=tuple(said.problems), failed=bool(said.problems))


def _devices(reports: Iterable[GraphReport]) -> list[DeviceInfo]:
    return list(dict.fromkeys(each.device for each in reports if each.device is not None))


def _end_device(
    device: DeviceInfo,
    reports: Sequence[GraphReport],
    collected: CollectedTests,
    settings: Settings,
    said: _SummaryLines,
) -> None:
    store = JsonStore(settings.baseline_folder, device)
    try:
        saved = store.load()
        commit = environment.commit(settings.rootdir) or {}
        plan = _plan(reports, collected, settings, saved, _short(commit))
        store.merge(plan.write, commit_info=commit, continues=not plan.replaces)
    except BaselineError as error:
        said.problems.append(str(error))
        return
    looked_at = _of_asked_sizes(_looked_at(saved, collected, settings.rootdir), reports, collected.asked_sizes)
    stale = record.stale(reports, looked_at, complete_run=collected.complete)
    said.lines += report.closing(
        reports,
        record.counts(reports, looked_at, complete_run=collected.complete, plan=plan),
        wrote=(len(plan.write), _shown(store.path, settings.rootdir)) if plan.write else None,
        refused=plan.refused,
        replaced=_replaced(plan, saved),
        stale=stale,
    )
    if stale and settings.strict:
        said.problems.append(_strict_about(stale, store.path, settings.rootdir))


def _replaced(plan: record.Plan, saved: Mapping[Key, SavedBatch]) -> list[tuple[str, int, str]]:
    """What this run accepts in place of what was saved; an update must not hide a slowdown."""
    entries = {(entry.name, entry.batch_size): entry for entry in plan.write}
    texts = [(*key, gate.replaced_text(saved[key], entries[key])) for key in plan.changed]
    return [each for each in texts if each[2]]


def _strict_about(stale: Sequence[Key], path: Path, root: Path) -> str:
    names = sorted({name for name, _ in stale})
    told = [shlex.quote(name) for name in names[:_NAMED]] + ["..."] * (len(names) > _NAMED)
    prune = f"pytest-cudagraph baseline prune {_shown(path.parent, root)} --name {' '.join(told)}"
    return f"strict: {len(stale)} stale in {_shown(path, root)}; where no test is meant to cover them: {prune}"


def _short(commit: Mapping[str, Any]) -> str:
    """``1a2b3c4``, ``1a2b3c4+`` with changes on top of it; empty where there is no commit."""
    return f"{commit['id'][:7]}{'+' if commit['dirty'] else ''}" if commit else ""


def _plan(
    reports: Iterable[GraphReport],
    collected: CollectedTests,
    settings: Settings,
    saved: Mapping[Key, SavedBatch],
    commit: str,
) -> record.Plan:
    """What to write; nothing unless it was asked for and the run came to its end."""
    if settings.update == "never" or not collected.finished:
        return record.Plan()
    passed = [each for each in reports if each.nodeid in collected.passed]
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return record.entries(passed, settings.update, saved, saved_at=now, commit=commit)


def _looked_at(saved: Mapping[Key, SavedBatch], collected: CollectedTests, root: Path) -> dict[Key, SavedBatch]:
    """The saved entries whose tests this run would have told of, if they were still there.

    A test may go by any ``name=``, also by what was its node id before it moved. So nothing is said where the file of
    some entry was left out, or single files were asked for; of a node id, where a silent test's file has it as a text;
    of other names, which may be put together while a test runs, where any test was silent or the run was not of all.
    """
    files = {name: name.partition("::")[0] for name, _ in saved}
    located = {name for name, file in files.items() if file != name}
    if any(files[name] not in collected.files and (root / files[name]).is_file() for name in located):
        return {}
    below = {name for name in located if _lies_below(files[name], collected.paths)}
    silent = {normal_name(nodeid) for nodeid in collected.silent}
    texts = [_text(root / file) for file in {nodeid.partition("::")[0] for nodeid in silent}]
    told = {name for name in below if name not in silent and not any(name in text for text in texts)}
    is_of_folders = all((root / path).is_dir() for path in collected.paths)
    if not collected.whole and (below != located or not is_of_folders):
        told = set()
    if collected.whole and not silent and "." in collected.paths:
        told |= files.keys() - located
    return {key: entry for key, entry in saved.items() if key[0] in told}


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def _of_asked_sizes(
    saved: dict[Key, SavedBatch], reports: Iterable[GraphReport], asked: frozenset[int]
) -> dict[Key, SavedBatch]:
    """Without the other sizes of models whose sizes were the command line's: nobody asked for them in this run.

    A model that names its own sizes has left out what it no longer names, unless they are just those that were asked
    for: then only a run without them can tell.
    """
    narrowed = {each.name for each in reports if asked and {batch.batch_size for batch in each.batches} == asked}
    return {key: entry for key, entry in saved.items() if key[0] not in narrowed or key[1] in asked}


def _lies_below(file: str, paths: Iterable[str]) -> bool:
    return any(path == "." or file == path or file.startswith(f"{path}/") for path in paths)


def _shown(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()


def _write_document(path: Path, reports: Sequence[GraphReport], settings: Settings, said: _SummaryLines) -> None:
    """Write ``--cudagraph-json`` whole or not at all, also when an interrupt comes."""
    device = next(iter(_devices(reports)), None)
    text = report.json_text(report.document(reports, device, settings))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        shown = settings.json
        said.problems.append(f"--cudagraph-json: {shown} could not be written: {error.strerror}; nothing was changed")
    finally:
        # Where it could not be written at all, it cannot be removed either.
        with contextlib.suppress(OSError):
            temporary.unlink()


def header_line(device: DeviceInfo, baseline_file: Path, settings: Settings, *, judged: bool) -> str:
    """What this run measures on, its baseline file and its least speedup."""
    shown = _shown(baseline_file, settings.rootdir)
    return report.header(device, baseline=shown, min_speedup=settings.min_speedup, judged=judged)
