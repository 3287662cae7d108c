"""The revisions of a baseline file, from the git log of its repository."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_cudagraph import environment
from pytest_cudagraph.baseline.names import Key
from pytest_cudagraph.baseline.remote import AnyPath
from pytest_cudagraph.baseline.schema import parse
from pytest_cudagraph.baseline.store import read
from pytest_cudagraph.errors import BaselineError
from pytest_cudagraph.values import SavedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRevisions:
    """What a file held in each revision, oldest first. The last is the file as it is."""

    entries: tuple[Mapping[Key, SavedBatch], ...]
    commits: int
    """How many of them are of commits."""
    notes: tuple[str, ...] = ()
    """Why revisions are missing."""


def revisions_of(path: AnyPath) -> FileRevisions:
    """Every revision of a baseline file. Without git, the file alone, and a note that says so.

    Raises :class:`~pytest_cudagraph.errors.BaselineError` for a file that cannot be read.
    """
    now = read(path).entries
    commits, notes = _commits(path)
    earlier = []
    for commit in commits:
        try:
            text = environment.git(Path(str(path)).parent, "show", f"{commit}:./{path.name}")
            # A commit that removed the file.
            earlier += [] if text is None else [parse(text, commit).entries]
        except BaselineError as error:
            notes.append(f"left out: {error}")
    return FileRevisions(entries=(*earlier, now), commits=len(earlier), notes=tuple(notes))


def _commits(path: AnyPath) -> tuple[list[str], list[str]]:
    """The commits that changed the file, oldest first, and why there may be more."""
    alone = "only the sessions in the file are shown"
    if not isinstance(path, Path):
        return [], [f"{path} is not in a git repository: {alone}"]
    found = environment.git(path.parent, "log", "--reverse", "--no-show-signature", "--format=%h", "--", path.name)
    if found is None:
        return [], [f"{path} is not in a git repository with commits, or git is missing: {alone}"]
    if not found:
        return [], [f"{path} was never committed: {alone}"]
    shallow = environment.git(path.parent, "rev-parse", "--is-shallow-repository") == "true"
    hint = "this clone is shallow and may lack earlier revisions: git fetch --unshallow"
    return found.split(), [hint] if shallow else []
