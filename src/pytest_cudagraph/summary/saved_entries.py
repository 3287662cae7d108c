"""The baseline at the end of a run, of one device: which entries are written, and which are stale."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pytest_cudagraph import environment, gate, record, report
from pytest_cudagraph.baseline import AnyPath, Edit, JsonStore, Key
from pytest_cudagraph.errors import BaselineError
from pytest_cudagraph.foreign import without_credentials
from pytest_cudagraph.settings.options import Settings
from pytest_cudagraph.values import DeviceInfo, GraphReport, SavedBatch

_LEFT = ".cudagraph-left"
"""The folder for entries that an object store did not take."""

_NAMED = 5
"""Names in the suggested command that removes stale entries."""


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


@dataclass(slots=True)
class SummaryLines:
    """What the summary of a run says so far."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def now() -> str:
    """The date and the time as documents and baselines have them."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def shown(path: AnyPath, root: Path) -> str:
    """A path of this machine from ``root``, another one whole."""
    if isinstance(path, Path) and path.is_relative_to(root):
        return path.relative_to(root).as_posix()
    return str(path)


def end_device(
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
        wrote=(len(plan.write), shown(store.path, settings.rootdir)) if plan.write else None,
        refused=plan.refused,
        replaced=[each for each in replaced if each[2]],
        stale=stale,
        dropped=plan.dropped,
        saves=settings.update != "never",
    )
    if stale and settings.strict:
        summary.problems.append(_strict_about(stale, saved, store.path, settings.rootdir))


def _strict_about(stale: Sequence[Key], saved: Iterable[Key], path: AnyPath, root: Path) -> str:
    sizes: dict[str, list[int]] = {}
    for name, batch_size in stale:
        sizes.setdefault(name, []).append(batch_size)
    # Sizes that a test still covers stay: a name alone would remove them as well.
    live = {name for name, _ in set(saved) - set(stale)}
    names_of: dict[tuple[int, ...], list[str]] = {}
    for name in list(sizes)[:_NAMED]:
        names_of.setdefault(tuple(sizes[name]) if name in live else (), []).append(name)
    file = shown(path, root)
    commands = " && ".join(_prune_command(file, names, batch_sizes) for batch_sizes, names in names_of.items())
    first = f" (the first {_NAMED} of {len(sizes)} tests)" if len(sizes) > _NAMED else ""
    return f"strict: {len(stale)} stale in {file}; where no test is meant to cover them{first}: {commands}"


def _prune_command(file: str, names: Sequence[str], batch_sizes: Sequence[int]) -> str:
    only = f" --batch-size {' '.join(map(str, batch_sizes))}" if batch_sizes else ""
    return f"pytest-cudagraph baseline prune {shlex.quote(file)} --name {shlex.join(names)}{only}"


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
    saved_at, commit = now(), environment.commit(settings.rootdir) or {}
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
    """The saved entries that this run must have measured if their tests and batch sizes still exist."""
    return _of_given_sizes(_of_present_tests(saved, collected, root), reports, collected.given_sizes)


def _of_present_tests(saved: Mapping[Key, SavedBatch], collected: CollectedTests, root: Path) -> dict[Key, SavedBatch]:
    """The saved entries that a complete run must have measured if their tests still exist. The others are never stale.

    A file that exists and was not collected may hold any test, and a test outside of the collected folders any name.
    """
    files = {name: name.partition("::")[0] for name, _ in saved}
    if any(file not in collected.files and _is_file(root / file) for file in files.values()):
        return {}
    below = {file for path in collected.paths for file in files.values() if f"{file}/".startswith(f"{path}/")}
    return {key: entry for key, entry in saved.items() if "." in collected.paths or files[key[0]] in below}


def _is_file(path: Path) -> bool:
    # A name may be longer than any file's. That is an error, not an answer.
    with contextlib.suppress(OSError):
        return path.is_file()
    return False


def _of_given_sizes(
    saved: dict[Key, SavedBatch], reports: Iterable[GraphReport], given: frozenset[int]
) -> dict[Key, SavedBatch]:
    """Leave out the other batch sizes of models that ran with exactly the sizes of the command line.

    Such a model may have more sizes without ``--cudagraph-batch-sizes``.
    """
    narrowed = {each.name for each in reports if given and {batch.batch_size for batch in each.batches} == given}
    return {key: entry for key, entry in saved.items() if key[0] not in narrowed or key[1] in given}
