"""Which source was measured: git's own name for the folder ``src``, computed from its files, with or without git."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

_EXECUTABLE = 0o100


def tree_of(folder: Path) -> str:
    """What ``git rev-parse HEAD:src`` would say if the files were committed as they lie here, byte code left out.

    Computed, so that it is also known where the tree was copied without its history (git's object format, version 1).
    """
    return _tree(folder).hex()


def _tree(folder: Path) -> bytes:
    entries: list[tuple[bytes, bytes]] = []
    for path in folder.iterdir():
        name = path.name.encode()
        if path.is_dir() and any(_files(path)):
            entries.append((name + b"/", b"40000 " + name + b"\0" + _tree(path)))
        elif path.is_file() and path.suffix != ".pyc":
            mode = b"100755 " if path.stat().st_mode & _EXECUTABLE else b"100644 "
            entries.append((name, mode + name + b"\0" + _object(b"blob", path.read_bytes())))
    return _object(b"tree", b"".join(entry for _, entry in sorted(entries)))


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]


def _object(kind: bytes, content: bytes) -> bytes:
    return hashlib.sha1(kind + b" %d\0" % len(content) + content, usedforsecurity=False).digest()


def git(root: Path, *arguments: str) -> str | None:
    """What git prints, stripped; None where it fails in whatever way."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", errors="replace").strip()


def source(root: Path) -> dict[str, object]:
    """For an evidence file: the tree measured, and whether it is the one last committed (None without git)."""
    tree, committed = tree_of(root / "src"), git(root, "rev-parse", "HEAD:src")
    return {"tree": tree, "dirty": None if committed is None else tree != committed}
