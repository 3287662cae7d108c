"""Check out a revision of the user's repository in a temporary git worktree."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from filelock import FileLock, Timeout

from pytest_cudagraph.environment import GIT, without_git_locals
from pytest_cudagraph.errors import RevisionError

_PREFIX, _RUNNING = "pytest-cudagraph-", "running.lock"
"""The folder around a worktree, and the lock in it."""

_SEPARATORS = re.compile(rf"([\s{re.escape(os.pathsep)}]+)")


def moved_argument(argument: str, top: Path, tree: Path) -> str:
    """The argument with each path below ``top`` moved to ``tree``: alone, behind an option, or in a list of paths.

    Paths are compared by their folders: ``/home/me/repo-data`` is no part of ``/home/me/repo``.
    """
    start = _start_of_path(argument)
    value = argument[start:]
    words = _SEPARATORS.split(value)
    # A folder's name may hold a space.
    if not all(Path(word).is_absolute() for word in words[::2]):
        words = [value]
    return argument[:start] + "".join(_moved_word(word, top, tree) for word in words)


def _start_of_path(argument: str) -> int:
    """Where an absolute path begins: in ``PATH``, ``-cPATH``, ``--opt=PATH``, ``name=PATH``; else the end."""
    short = [2] if re.match("-[A-Za-z]", argument) else []
    starts = [0, *short, *(sign.end() for sign in re.finditer("=", argument))]
    return next((start for start in starts if Path(argument[start:]).is_absolute()), len(argument))


def _moved_word(word: str, top: Path, tree: Path) -> str:
    file, colons, names = word.partition("::")
    path = Path(os.path.normpath(file))
    for above in (*reversed(path.parents), path) if Path(file).is_absolute() else ():
        # The user may reach the repository by a link. Links within it stay links.
        if Path(os.path.realpath(above)) == top:
            return f"{tree / path.relative_to(above)}{colons}{names}"
    return word


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """A commit, the name it was asked for by, and the repository's top folder."""

    name: str
    commit: str
    top: Path

    def __str__(self) -> str:
        """``HEAD~1 (a1b2c3d)``."""
        return f"{self.name} ({self.commit[:7]})"


def find_revision(folder: Path, name: str) -> Revision:
    """The commit that ``name`` (a branch, a tag, ``HEAD~1``) stands for in the repository around ``folder``.

    Raises :class:`~pytest_cudagraph.errors.RevisionError` where there is no repository, no git, or no such commit.
    """
    try:
        top = _git(folder, "rev-parse", "--show-toplevel")
    except RevisionError as error:
        raise RevisionError(f"a git repository is needed to check out {name!r}; {folder} lies in none") from error
    try:
        # ^{commit} peels a tag; without --end-of-options a name that begins with a dash would be an option.
        commit = _git(folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    except RevisionError as error:
        raise RevisionError(
            f"a branch, tag or commit of this repository is allowed; found {name!r}, which names none here\n"
            "  a shallow clone lacks older commits: fetch them first (git fetch --unshallow)"
        ) from error
    return Revision(name=name, commit=commit, top=Path(top).resolve())


@contextmanager
def checked_out(revision: Revision) -> Iterator[Path]:
    """The folder of a git worktree at ``revision``. It is removed afterwards, also after Ctrl-C or SIGTERM.

    After SIGKILL the next call for the same repository removes it.
    """
    _remove_abandoned(revision.top)
    with (
        _termination_as_interrupt(),
        tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as folder,
        FileLock(Path(folder) / _RUNNING),
    ):
        # The folder keeps its name, because packages and configuration may depend on it.
        tree = Path(folder).resolve() / revision.top.name
        try:
            _git(revision.top, "worktree", "add", "--detach", "--quiet", str(tree), revision.commit)
            yield tree
        finally:
            _remove(revision.top, tree)


def _remove_abandoned(top: Path) -> None:
    """Remove the worktrees of killed processes. The lock beside a worktree is held as long as its process lives."""
    for line in _git(top, "worktree", "list", "--porcelain").splitlines():
        tree = Path(line.removeprefix("worktree "))
        lock = tree.parent / _RUNNING
        if line.startswith("worktree ") and tree.parent.name.startswith(_PREFIX) and lock.is_file():
            with suppress(Timeout, OSError), FileLock(lock, timeout=0):
                _remove(top, tree)
                shutil.rmtree(tree.parent, ignore_errors=True)


def _remove(top: Path, tree: Path) -> None:
    """Remove the worktree from the repository's list, in any state that an interrupt left.

    ``git worktree prune`` would also remove the user's worktrees that are not reachable now.
    """
    for _ in range(2):
        with suppress(RevisionError):
            _git(top, "worktree", "remove", "--force", "--force", str(tree))
            return
        # Git refuses to remove a broken worktree, but removes one whose folder is gone.
        shutil.rmtree(tree, ignore_errors=True)


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """Turn SIGTERM into an interrupt: a CI server sends it to cancel a job, and the worktree must be removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(f"signal {number}")

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _git(folder: Path, *arguments: str) -> str:
    command = [*GIT, "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, check=True, env=without_git_locals())
    except FileNotFoundError as error:
        raise RevisionError("git is needed and is not on the PATH") from error
    except subprocess.CalledProcessError as error:
        output = error.stderr.decode("utf-8", errors="replace").strip()
        raise RevisionError(f"git {arguments[0]} failed: {output or f'exit code {error.returncode}'}") from error
    return done.stdout.decode("utf-8", errors="replace").strip()
