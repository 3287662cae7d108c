"""Files that the user names: only regular ones are read, and one is written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any

_ENCODING_ERRORS = "backslashreplace"
"""A lone surrogate becomes ``\\udc80``, which JSON reads back as the same character. UTF-8 has no code for it."""


def is_same_path(one: str | Path, other: str | Path) -> bool:
    """Whether two names lead to the same place, also through links. The files need not exist."""
    return os.path.realpath(one) == os.path.realpath(other)


def read_text(path: Path) -> str:
    """The text of a regular file. Raises :class:`OSError` and :class:`UnicodeDecodeError`.

    A pipe or a device is refused: it may have no end, or wait for a writer for ever.
    """
    with open(path, encoding="utf-8-sig", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "only a regular file is read", str(path))
        return file.read()


def read_json(path: Path) -> Any:
    """The value of a JSON file. Raises :class:`OSError`, and :class:`ValueError` for what is no JSON."""
    return parse_json(read_text(path))


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises :class:`ValueError`, also for brackets that are nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _open_at_once(path: str, flags: int) -> int:
    """Open a pipe without waiting for its other end. Windows has no such flag, and no such files."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def write_text(path: Path, text: str) -> None:
    """Write a regular file whole or not at all, also when an interrupt comes. Raises :class:`OSError`.

    The permissions of an existing file stay, and a symbolic link stays a link to the file that is written. A pipe and
    a device are refused, and what ``/dev/stdout`` names: to replace a file would lose all that is printed to it.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.is_relative_to("/dev") or (path.exists() and not path.is_file()):
        raise OSError(errno.EINVAL, "only a regular file is written", str(path))
    _replace(Path(os.path.realpath(path)), text.encode("utf-8", errors=_ENCODING_ERRORS))


def short_name(name: str, most: int = 80) -> str:
    """The name, or its beginning and a hash. File systems allow 255 bytes, and suffixes come on top."""
    encoded = name.encode("utf-8", errors=_ENCODING_ERRORS)
    if len(encoded) <= most:
        return name
    digest = hashlib.sha256(encoded).hexdigest()[:12]
    return f"{encoded[: most - 13].decode('utf-8', errors='ignore')}-{digest}"


def remove_temporary(path: Path) -> None:
    """Remove what killed writers of ``path`` left. Only for a process that excludes all other writers."""
    for left in path.parent.glob(f"{glob.escape(_prefix(path))}*.tmp"):
        left.unlink(missing_ok=True)


def _prefix(path: Path) -> str:
    return f".{short_name(path.name)}."


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"{_prefix(path)}{secrets.token_hex(4)}.tmp")
    try:
        # Mode x: another user may have put a link there. The user's umask narrows the permissions.
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            # Without this, a power cut after the rename can leave an empty file.
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            temporary.chmod(stat.S_IMODE(path.stat().st_mode))
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
