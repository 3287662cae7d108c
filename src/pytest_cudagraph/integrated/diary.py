"""What one model has gone through: counted for its statistics, and said once to the log."""

from __future__ import annotations

import logging
from collections import Counter

from pytest_cudagraph.compile.causes import first_line
from pytest_cudagraph.errors import CudagraphError
from pytest_cudagraph.integrated.statistics import Path, Setback

_log = logging.getLogger("pytest_cudagraph.integrated")

_MAX_NOTES = 100
"""Messages may hold a number that is another one each time."""


class Diary:
    """The counters and notes of one model; whoever writes holds its lock."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._notes: dict[str, None] = {}  # a set that keeps its order
        self.paths: Counter[Path] = Counter()
        self.reasons: Counter[str] = Counter()

    @property
    def notes(self) -> tuple[str, ...]:
        """Every setback so far, each once."""
        return tuple(self._notes)

    def count(self, path: Path, reason: str) -> None:
        """One call has been served."""
        self.paths[path] += 1
        if reason:
            self.reasons[reason] += 1
            if self.reasons[reason] == 1:
                _log.warning("%s: a call runs %s: %s (said once, counted from now on)", self._name, path, reason)

    def say(self, setback: Setback, why: str | BaseException) -> None:
        """Something of the optimisation will not be."""
        note = f"{setback.value}: {one_line(why) if isinstance(why, str) else cause_of(why)}"
        if note not in self._notes and len(self._notes) < _MAX_NOTES:
            self._notes[note] = None
            _log.warning("%s: %s", self._name, note)


def cause_of(error: BaseException) -> str:
    """An error in one line; ours as a whole, for it holds the remedy."""
    if isinstance(error, CudagraphError):
        return one_line(str(error))
    return first_line(error)


def one_line(text: str) -> str:
    """Lines of a message as a log has them."""
    return "; ".join(line.strip() for line in text.splitlines())
