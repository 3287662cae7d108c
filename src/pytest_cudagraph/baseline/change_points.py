"""When the sides of an entry moved: the revisions of its file from the git log, and change points among its sessions.

A change point is marked by the prediction bound of the gate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from pytest_cudagraph import environment
from pytest_cudagraph.baseline.history import change_of_sessions, session_of_arm
from pytest_cudagraph.baseline.remote import AnyPath
from pytest_cudagraph.baseline.schema import Key, parse
from pytest_cudagraph.baseline.store import read
from pytest_cudagraph.errors import BaselineError
from pytest_cudagraph.values import Latency, LatencyChange, SavedBatch, Session

LEAST_CHANGE = 0.02
"""The least change that counts, as a fraction. The bound alone marks some 6 % of unchanged sessions, with it 0.2 %.

At 1.3 % between sessions (``benchmarks/change_points.py``).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """The first session of a side beyond the bound of those before it."""

    side: str
    """``eager``, ``compiled`` or ``replay``."""
    before: Session
    """The last session before the move."""
    after: Session
    change: LatencyChange


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChange:
    """A session whose graph has another number of kernels."""

    after: Session
    kernels: tuple[int, int]
    """Before and after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryHistory:
    """All sessions of an entry that its file ever held, and its change points, oldest first."""

    name: str
    batch_size: int
    sides: Mapping[str, tuple[tuple[Session, ...], ...]]
    """By side: its sessions between change points. Of eager and compiled, only changed values are saved."""
    moves: tuple[Move, ...]
    kernel_changes: tuple[KernelChange, ...]

    @property
    def sessions(self) -> tuple[Session, ...]:
        """Those of the replay."""
        return tuple(session for part in self.sides["replay"] for session in part)


def entry_histories(
    revisions: Sequence[Mapping[Key, SavedBatch]], *, least_change: float = LEAST_CHANGE
) -> list[EntryHistory]:
    """The history of each entry from the revisions of its file, oldest first. A fraction is the least change."""
    keys = sorted({key for entries in revisions for key in entries})
    return [_of([entries[key] for entries in revisions if key in entries], least_change) for key in keys]


def _of(saved: Sequence[SavedBatch], least_change: float) -> EntryHistory:
    sides = {"eager": _arm(saved, "eager"), "compiled": _arm(saved, "compiled"), "replay": _replays(saved)}
    parts: dict[str, tuple[tuple[Session, ...], ...]] = {}
    moves: list[Move] = []
    for side, machines in sides.items():
        split = [split_at_moves(side, sessions, least_change) for sessions in machines]
        parts[side] = tuple(part for pieces, _ in split for part in pieces)
        moves += [move for _, at_ends in split for move in at_ends]
    return EntryHistory(
        name=saved[-1].name,
        batch_size=saved[-1].batch_size,
        sides=parts,
        moves=tuple(sorted(moves, key=lambda move: move.after.date)),
        kernel_changes=tuple(_kernel_changes(saved)),
    )


def _replays(saved: Sequence[SavedBatch]) -> list[list[Session]]:
    """The sessions of the replay, a list for each machine: latencies of other hardware are not comparable."""
    machines: list[list[Session]] = []
    seen: set[Session] = set()
    for before, entry in zip((None, *saved), saved, strict=False):
        if before is None or before.device.hardware_changes(entry.device):
            machines.append([])
        new = [each for each in entry.sessions if each not in seen]
        seen.update(new)
        machines[-1] += new
    # Branches that were merged interleave. Sessions of a day keep their order.
    return [sorted(sessions, key=lambda session: session.date) for sessions in machines]


def _arm(saved: Sequence[SavedBatch], side: str) -> list[list[Session]]:
    """The same of eager or compiled. The file keeps their latencies, and when they were saved, until they change."""
    machines: list[list[Session]] = []
    for before, entry in zip((None, *saved), saved, strict=False):
        if before is None or before.device.hardware_changes(entry.device):
            machines.append([])
        latency: Latency | None = getattr(entry, side)
        if latency is not None and (before is None or before.saved_at != entry.saved_at):
            machines[-1].append(_session_of(latency, entry))
    return machines


def _session_of(arm: Latency, entry: SavedBatch) -> Session:
    """With commit and reference of the session that was saved with the latency."""
    sessions = entry.sessions
    beside = next((each for each in reversed(sessions) if each.date == entry.saved_at[:10]), sessions[-1])
    session = session_of_arm(arm, None, beside.software, date=beside.date, commit=beside.commit)
    return replace(session, reference_q25_ns=beside.reference_q25_ns, reference_median_ns=beside.reference_median_ns)


def split_at_moves(
    side: str, sessions: Sequence[Session], least_change: float
) -> tuple[list[tuple[Session, ...]], list[Move]]:
    """The sessions between change points, and the moves at them."""
    parts: list[list[Session]] = []
    moves: list[Move] = []
    for session in sessions:
        change = change_of_sessions(parts[-1], session) if parts else None
        least_log = math.log1p(least_change)
        if change is not None and change.low_log <= least_log and change.high_log >= -least_log:
            parts[-1].append(session)
            continue
        if change is not None:
            moves.append(Move(side=side, before=parts[-1][-1], after=session, change=change))
        parts.append([session])
    return [tuple(part) for part in parts], moves


def _kernel_changes(saved: Sequence[SavedBatch]) -> Iterable[KernelChange]:
    for before, after in pairwise(saved):
        if before.kernels is not None and after.kernels is not None and before.kernels != after.kernels:
            # All sessions of an entry have its kernels.
            yield KernelChange(after=after.sessions[0], kernels=(before.kernels, after.kernels))


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
    commits = environment.git(path.parent, "log", "--reverse", "--no-show-signature", "--format=%h", "--", path.name)
    if commits is None:
        return [], [f"{path} is not in a git repository with commits, or git is missing: {alone}"]
    if not commits:
        return [], [f"{path} was never committed: {alone}"]
    shallow = environment.git(path.parent, "rev-parse", "--is-shallow-repository") == "true"
    hint = "this clone is shallow and may lack earlier revisions: git fetch --unshallow"
    return commits.split(), [hint] if shallow else []
