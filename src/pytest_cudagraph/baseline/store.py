"""Where baselines are kept: a JSON file per device model."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pytest_cudagraph.baseline.history import continued
from pytest_cudagraph.baseline.names import Key, slug
from pytest_cudagraph.baseline.schema import Content, parse
from pytest_cudagraph.baseline.text import about_text, machine_info, records_text
from pytest_cudagraph.errors import BaselineError
from pytest_cudagraph.gc_pause import gc_paused
from pytest_cudagraph.values import DeviceInfo, SavedBatch

_LOCK_WAIT_S = 30.0
"""Writing takes milliseconds; whoever holds the lock for longer is stuck, or the file system has no locks."""

_IGNORED = "*.lock\n*.tmp\n"


class JsonStore:
    """The baseline file of one device model: ``FOLDER/nvidia-h200.json``."""

    def __init__(self, folder: Path, device: DeviceInfo) -> None:
        self.path = Path(folder) / f"{slug(device)}.json"
        self._device = device

    def load(self) -> dict[Key, SavedBatch]:
        """Everything saved; empty where there is no file yet.

        Raises :class:`~pytest_cudagraph.errors.BaselineError` naming a file that cannot be read.
        """
        return dict(read(self.path).entries)

    def merge(self, saved: Iterable[SavedBatch], *, commit_info: Mapping[str, Any], continues: bool = False) -> None:
        """Write these entries among those the file holds by then; an entry of the same key is replaced.

        With ``continues`` an entry that found what is saved adds its session to that instead. Raises
        :class:`~pytest_cudagraph.errors.BaselineError`; the old file is whole then.
        """
        new = list(saved)
        if not new:
            return
        about = machine_info(self._device)

        def add(old: Content) -> Content:
            entries = _merged(old.entries, new, continues=continues)
            return Content(entries=entries, machine_info=about, commit_info=commit_info)

        _change(self.path, add)


def _merged(old: Mapping[Key, SavedBatch], new: Iterable[SavedBatch], *, continues: bool) -> dict[Key, SavedBatch]:
    entries = dict(old)
    for entry in new:
        key = (entry.name, entry.batch_size)
        # Decided here, on what another process may have written meanwhile: its session is not lost.
        entries[key] = continued(entries[key], entry) if continues and key in entries else entry
    return entries


# A collection in the middle would look at millions of new objects, and find nothing to free.
@gc_paused()
def read(path: Path) -> Content:
    """A baseline file, empty where there is none. Raises :class:`~pytest_cudagraph.errors.BaselineError` naming it."""
    text = _text(path)
    return Content() if text is None else parse(text, str(path))


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as exc:
        raise BaselineError(f"{path}: cannot be read ({_reason(exc)})") from exc


def remove_from(path: Path, keys: Iterable[Key]) -> None:
    """Drop entries from a file; a file without entries is removed, for it would tell nothing."""
    doomed = set(keys)
    if not path.exists() or not doomed:
        return

    def drop(old: Content) -> Content:
        return replace(old, entries={key: entry for key, entry in old.entries.items() if key not in doomed})

    _change(path, drop)


def _change(path: Path, edit: Callable[[Content], Content]) -> None:
    """Read, edit and replace a file while no other process does; on any failure the old file stays whole."""
    try:
        # A link stays a link: the file it leads to is the one replaced.
        target = Path(os.path.realpath(path))
        _prepare(target.parent)
        with FileLock(target.with_name(f".{target.name}.lock"), timeout=_LOCK_WAIT_S):
            _rewrite(target, edit)
    except BaselineError as exc:
        raise BaselineError(f"{exc}; the file was left as it is") from exc
    except Timeout as exc:
        raise BaselineError(f"{path}: another process has held its lock for {_LOCK_WAIT_S:.0f} s") from exc
    except (OSError, ValueError, NotImplementedError) as exc:
        # The last: a file system without locks.
        raise BaselineError(f"{path}: cannot be written ({_reason(exc)}); nothing was changed") from exc


def _prepare(folder: Path) -> None:
    """Make the folder where there is none; only a folder of our own gets a ``.gitignore`` for its working files."""
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".gitignore").write_text(_IGNORED, encoding="utf-8")


@gc_paused()
def _rewrite(path: Path, edit: Callable[[Content], Content]) -> None:
    old = _text(path)
    new = edit(Content() if old is None else parse(old, str(path)))
    if not new.entries:
        path.unlink(missing_ok=True)
        return
    records = records_text(new.entries)
    # Another commit alone is no reason to write.
    if old is None or not old.startswith(records):
        _write(path, records + about_text(new))


def _write(path: Path, text: str) -> None:
    # Whoever holds the lock is alone: what lies there was left by a process that was killed.
    for left in path.parent.glob(f".{path.name}.*.tmp"):
        left.unlink(missing_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            # Without this a power cut after the rename can leave an empty file under the old name.
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, temporary)
        temporary.replace(path)
    except BaseException:  # also an interrupt must not leave the temporary file behind
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _reason(exc: BaseException) -> str:
    return getattr(exc, "strerror", None) or str(exc)
