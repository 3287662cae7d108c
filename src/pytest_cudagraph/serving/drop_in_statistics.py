"""How the drop-in compiler served calls: its counters and notes, and their frozen copies."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from pytest_cudagraph.errors import CudagraphError, first_line
from pytest_cudagraph.serving.calls import note_served
from pytest_cudagraph.serving.statistics import reasons_text
from pytest_cudagraph.units import bytes_text, plural, seconds_text
from pytest_cudagraph.values import CompileMode

ServingPath = Literal["graph", "compiled", "eager"]


class DegradeReason(str, Enum):
    """What was not optimised, or is no longer; logged once per cause."""

    NOT_COMPILED = "not compiled"
    CODE_DIFFERS = "compiled code not used"
    CODE_DROPPED = "compiled code dropped"
    NOT_CAPTURED = "not captured"
    NOT_PADDED = "not padded"
    NOT_SERVED = "not served"


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceResult:
    """The output of one call, what computed it, and why no graph did."""

    output: Any
    path: ServingPath
    reason: str = ""
    """Empty for a graph; else the reason that the statistics count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatistics:
    """The calls that one model of a compiler has served so far."""

    name: str
    mode: str
    """The requested mode."""
    compile_mode: CompileMode
    """How the mode compiles."""
    device: str
    """``cuda:0`` or ``cpu``; empty when no device could be opened."""
    paths: Mapping[ServingPath, int]
    reasons: Mapping[str, int]
    """Why calls were not served by a graph."""
    padded: int
    """Calls that a graph served after padding."""
    compiled_sizes: tuple[int, ...]
    """Batch sizes whose compiled code agrees with eager."""
    compile_ns: int
    """Time of all compiles; failed ones are included."""
    capture_ns: int
    """Time of all captures and their checks."""
    memory_bytes: Mapping[int, int | None]
    """Memory of each present graph by batch size; None where the device cannot tell."""
    notes: tuple[str, ...]
    """What was not optimised, with the cause, as in the log."""

    @property
    def calls(self) -> int:
        """All calls."""
        return sum(self.paths.values())

    def lines(self) -> list[str]:
        """The same in words."""
        return [self._served(), *self._reasons(), self._made(), *(f"  {note}" for note in self.notes)]

    def _served(self) -> str:
        counts = ", ".join(f"{self.paths.get(path, 0)} {path}" for path in ("graph", "compiled", "eager"))
        padded = f" ({self.padded} padded)" if self.padded else ""
        place = f" on {self.device}" if self.device else ""
        return f"{self.name} ({self.mode}){place}: {plural(self.calls, 'call')}: {counts}{padded}"

    def _reasons(self) -> list[str]:
        return [f"  no graph: {reasons_text(self.reasons)}"] if self.reasons else []

    def _made(self) -> str:
        known = [count for count in self.memory_bytes.values() if count is not None]
        graphs = f"batch {', '.join(map(str, sorted(self.memory_bytes)))}" if self.memory_bytes else "none"
        memory = f", {bytes_text(sum(known))}" if known else ""
        compiled = f"; compiled: batch {', '.join(map(str, self.compiled_sizes))}" if self.compiled_sizes else ""
        times = f"; compile {seconds_text(self.compile_ns)}, capture {seconds_text(self.capture_ns)}"
        return f"  graphs: {graphs}{memory}{compiled}{times}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerStatistics:
    """The calls that an :class:`IntegratedAOTCompiler` has served so far, for the models that still exist."""

    models: tuple[ModelStatistics, ...]
    unknown: int
    """Calls of models that it did not compile; they ran eager."""

    @property
    def paths(self) -> Mapping[ServingPath, int]:
        """The calls of all models by path; calls of unknown models count as eager."""
        unknown: dict[ServingPath, int] = {"graph": 0, "compiled": 0, "eager": self.unknown}
        return {path: count + sum(model.paths.get(path, 0) for model in self.models) for path, count in unknown.items()}

    @property
    def calls(self) -> int:
        """All calls."""
        return sum(self.paths.values())

    def lines(self) -> list[str]:
        """The same in words."""
        unknown = [f"{plural(self.unknown, 'call')} of other models: eager"] if self.unknown else []
        return [line for model in self.models for line in model.lines()] + unknown


_log = logging.getLogger("pytest_cudagraph.serving")

_MAX_NOTES = 100
"""A limit, because a message may contain a number that changes each time."""


class EventLog:
    """The counters and notes of one model. A writer holds the model's lock."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._notes: dict[str, None] = {}  # an ordered set
        self.paths: Counter[ServingPath] = Counter()
        self.reasons: Counter[str] = Counter()

    @property
    def notes(self) -> tuple[str, ...]:
        """All notes so far, each once."""
        return tuple(self._notes)

    def count(self, path: ServingPath, reason: str) -> None:
        """Count one call."""
        self.paths[path] += 1
        if path != "graph":  # its runner said so
            note_served(path, reason)
        if reason:
            self.reasons[reason] += 1
            if self.reasons[reason] == 1:
                _log.warning("%s: a call runs %s: %s (logged once, then only counted)", self._name, path, reason)

    def add(self, what: DegradeReason, why: str | BaseException) -> None:
        """Note and log once what is not optimised, and why."""
        note = f"{what.value}: {one_line(why) if isinstance(why, str) else cause_of(why)}"
        if note not in self._notes and len(self._notes) < _MAX_NOTES:
            self._notes[note] = None
            _log.warning("%s: %s", self._name, note)


def cause_of(error: BaseException) -> str:
    """An error in one line; errors of this package with all their lines, which contain the remedy."""
    if isinstance(error, CudagraphError):
        return one_line(str(error))
    return first_line(error)


def one_line(text: str) -> str:
    """Join the lines of a message for a log."""
    return "; ".join(line.strip() for line in text.splitlines())
