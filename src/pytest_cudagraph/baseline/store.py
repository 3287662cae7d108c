"""Where baselines are kept: a JSON file per device model, on this machine or in an object store."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from pytest_cudagraph import files
from pytest_cudagraph.baseline.history import age, continued, is_continued, joined
from pytest_cudagraph.baseline.remote import AnyPath, RemotePath, any_path
from pytest_cudagraph.baseline.schema import Content, Key, parse
from pytest_cudagraph.baseline.text import about_text, machine_info, records_text, slug
from pytest_cudagraph.errors import BaselineError
from pytest_cudagraph.gc_pause import gc_paused
from pytest_cudagraph.values import DeviceInfo, SavedBatch

_LOCK_WAIT_S = 30.0
"""Writing takes milliseconds. A process that holds the lock for longer hangs, or the file system has no locks."""

_IGNORED = "*.lock\n*.tmp\n"


class Edit(NamedTuple):
    """What an update writes, and which entries it drops."""

    write: Sequence[SavedBatch]
    drop: Collection[Key] = ()


class JsonStore:
    """The baseline file of one device model: ``FOLDER/nvidia-h200.json``. A text is a path or a URL."""

    def __init__(self, folder: AnyPath | str, device: DeviceInfo) -> None:
        self.path = (any_path(folder) if isinstance(folder, str) else folder) / f"{slug(device)}.json"
        self._device = device

    def load(self) -> dict[Key, SavedBatch]:
        """All saved entries. Empty without a file.

        Raises :class:`~pytest_cudagraph.errors.BaselineError` naming a file that cannot be read.
        """
        return dict(read(self.path).entries)

    def update(
        self,
        choose: Callable[[Mapping[Key, SavedBatch]], Edit],
        *,
        commit_info: Mapping[str, Any],
        continues: bool = False,
    ) -> Mapping[Key, SavedBatch]:
        """Make the edit that ``choose`` selects, and return the entries that the file held before.

        ``choose`` is called under the lock, so that entries of other processes are not lost. Without a file it is
        called once before, and no folder is made if it selects nothing. An entry of the same key is replaced. With
        ``continues`` an entry of unchanged speed adds its session to the saved one instead. Raises
        :class:`~pytest_cudagraph.errors.BaselineError`. Then the old file is unchanged.
        """
        before: Mapping[Key, SavedBatch] = {}
        if not self.path.exists() and not choose(before).write:
            return before

        def apply(old: Content) -> Content:
            nonlocal before
            before, edit = old.entries, choose(old.entries)
            if not edit.write and not edit.drop:
                return old
            return self._content(_edited(old.entries, edit, continues=continues), commit_info)

        _change(self.path, apply)
        return before

    def merge(self, new: Iterable[SavedBatch], *, commit_info: Mapping[str, Any]) -> tuple[int, tuple[Key, ...]]:
        """Join entries of other files with what this file holds, by :func:`~pytest_cudagraph.baseline.history.joined`.

        Returns the number of entries that the file then holds, and the keys whose newest entry replaced an older one,
        because their histories do not continue each other. Raises :class:`~pytest_cudagraph.errors.BaselineError`.
        Then the old file is unchanged.
        """
        new, count, replaced = list(new), 0, set[Key]()

        def join(old: Content) -> Content:
            nonlocal count
            entries = dict(old.entries)
            for entry in new:
                key = (entry.name, entry.batch_size)
                older, newer = sorted((entries.get(key, entry), entry), key=age)
                is_joined = older is not newer and is_continued(older, newer)
                replaced.update([key] if not is_joined and older != newer else [])
                entries[key] = joined(older, newer) if is_joined else newer
            count = len(entries)
            return self._content(entries, commit_info)

        if new:
            _change(self.path, join)
        return count, tuple(sorted(replaced))

    def _content(self, entries: Mapping[Key, SavedBatch], commit_info: Mapping[str, Any]) -> Content:
        return Content(entries=entries, machine_info=machine_info(self._device), commit_info=commit_info)


def _edited(old: Mapping[Key, SavedBatch], edit: Edit, *, continues: bool) -> dict[Key, SavedBatch]:
    entries = {key: entry for key, entry in old.items() if key not in edit.drop}
    for entry in edit.write:
        key = (entry.name, entry.batch_size)
        # Decided under the lock, so that the session of another process is not lost.
        entries[key] = continued(entries[key], entry) if continues and key in entries else entry
    return entries


# A garbage collection would visit millions of new objects and free none.
@gc_paused()
def read(path: AnyPath) -> Content:
    """The content of a file, or nothing without one. Raises :class:`~pytest_cudagraph.errors.BaselineError`."""
    text = _text(path)
    return Content() if text is None else parse(text, str(path))


def json_files(folder: AnyPath) -> list[AnyPath]:
    """The JSON files of a folder, by name. Raises :class:`~pytest_cudagraph.errors.BaselineError`."""
    if isinstance(folder, Path):
        return [path for path in sorted(folder.glob("*.json")) if path.is_file()]
    try:
        return list(folder.json_files())
    except OSError as exc:
        raise BaselineError(f"{folder}: cannot be read ({_reason(exc)})") from exc


def _text(path: AnyPath) -> str | None:
    try:
        return path.read_bytes().decode("utf-8-sig") if isinstance(path, RemotePath) else files.read_text(path)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as exc:
        raise BaselineError(f"{path}: cannot be read ({_reason(exc)})") from exc


def remove_from(path: AnyPath, keys: Iterable[Key]) -> None:
    """Drop entries from a file. A file without entries is removed."""
    doomed = set(keys)
    if not path.exists() or not doomed:
        return

    def drop(old: Content) -> Content:
        return replace(old, entries={key: entry for key, entry in old.entries.items() if key not in doomed})

    _change(path, drop)


def _change(path: AnyPath, edit: Callable[[Content], Content]) -> None:
    """Read, edit and replace a file under its lock. On any failure the old file stays unchanged."""
    try:
        with _locked(path) as target:
            _rewrite(target, edit)
    except BaselineError as exc:
        raise BaselineError(f"{exc}; the file was left as it is") from exc
    except Timeout as exc:
        raise BaselineError(f"{path}: another process has held its lock for {_LOCK_WAIT_S:.0f} s") from exc
    except (OSError, ValueError, NotImplementedError) as exc:
        # NotImplementedError: a file system without locks.
        raise BaselineError(f"{path}: cannot be written ({_reason(exc)}); nothing was changed") from exc


@contextlib.contextmanager
def _locked(path: AnyPath) -> Iterator[AnyPath]:
    """Hold the lock of a file. A symbolic link stays: the file it points to is given."""
    if isinstance(path, RemotePath):
        with path.locked():
            yield path
        return
    target = Path(os.path.realpath(path))
    _prepare(target.parent)
    with FileLock(target.with_name(f".{files.short_name(target.name)}.lock"), timeout=_LOCK_WAIT_S):
        yield target


def _prepare(folder: Path) -> None:
    """Make the folder. Only a folder made here gets a ``.gitignore`` for lock and temporary files."""
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".gitignore").write_text(_IGNORED, encoding="utf-8")


@gc_paused()
def _rewrite(path: AnyPath, edit: Callable[[Content], Content]) -> None:
    old = _text(path)
    content = Content() if old is None else parse(old, str(path))
    new = edit(content)
    if new is content:
        return
    if not new.entries:
        path.unlink()
        return
    records = records_text(new.entries)
    # Another commit alone does not change the file.
    if old is None or not old.startswith(records):
        _write(path, records + about_text(new))


def _write(path: AnyPath, text: str) -> None:
    if isinstance(path, RemotePath):
        path.write_text(text)
    else:
        files.remove_temporary(path)
        files.write_text(path, text)


def _reason(exc: BaseException) -> str:
    return getattr(exc, "strerror", None) or str(exc)
