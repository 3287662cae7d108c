"""How calls were served: counted while a runner or a compiler works, frozen for a reader."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from pytest_cudagraph.errors import CudagraphError, first_line
from pytest_cudagraph.units import bytes_text, plural, seconds_text
from pytest_cudagraph.values import CompileMode


class EagerReason(str, Enum):
    """Why a call did not replay a graph."""

    NO_ROWS = "no rows"
    TOO_LARGE = "beyond the largest batch size"
    OTHER_ARGUMENT = "other argument"
    OTHER_SHAPE = "other shape or dtype"
    OTHER_AUTOCAST = "other autocast"
    REFUSED = "capture refused"
    NOT_PADDED = "outputs cannot be cut"
    MIXED_ROWS = "rows depend on each other"
    PADDED_STATE = "padding would change state"


@dataclass(slots=True)
class Tally:
    """The counters of one runner; whoever writes holds its lock."""

    padded: int = 0
    padding_rows: int = 0
    captures: int = 0
    recaptures: int = 0
    evictions: int = 0
    state_changes: int = 0
    capture_ns: int = 0
    replays: Counter[int] = field(default_factory=Counter)
    eager: Counter[EagerReason] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerStatistics:
    """What a :class:`GraphRunner` has served so far."""

    device: str
    hits: int
    """Calls whose batch size has a graph."""
    padded: int
    """Calls that were padded to the next batch size with a graph."""
    padding_rows: int
    """Rows computed for nothing, in all padded calls."""
    eager: Mapping[str, int]
    """Calls that ran the model itself, by the reason."""
    replays: Mapping[int, int]
    """Calls by the batch size of the graph that served them."""
    memory_bytes: Mapping[int, int | None]
    """Of each graph there is now, what it added to the pool; None where the backend cannot tell."""
    refused: Mapping[int, str]
    """Batch sizes whose capture was refused, and why."""
    not_padded: str = ""
    """Why no call is padded: outputs that cannot be cut, rows that depend on each other; empty while calls are."""
    captures: int
    recaptures: int
    """Captures of a batch size that had had a graph before: evicted, or dropped after a change of the model."""
    evictions: int
    state_changes: int
    """How often the model was found changed, which drops all graphs."""
    capture_ns: int
    """Time spent on captures, warm-up and refused ones included."""

    @property
    def calls(self) -> int:
        """All calls that were served."""
        return self.hits + self.padded + sum(self.eager.values())

    def lines(self) -> list[str]:
        """The same in words."""
        return [self._served(), *self._graphs(), *self._eagerly(), self._captured(), *self._refusals()]

    def _served(self) -> str:
        padding = f" ({plural(self.padding_rows, 'row')} of padding)" if self.padded else ""
        eager = sum(self.eager.values())
        served = f"{self.hits} exact, {self.padded} padded{padding}, {eager} eager"
        return f"{plural(self.calls, 'call')} on {self.device}: {served}"

    def _graphs(self) -> list[str]:
        lines = []
        for size in sorted({*self.replays, *self.memory_bytes}):
            memory = self.memory_bytes.get(size)
            held = "no graph now" if size not in self.memory_bytes else "" if memory is None else bytes_text(memory)
            replays = plural(self.replays.get(size, 0), "replay")
            lines.append(f"  batch {size}: {replays}{f', {held}' if held else ''}")
        return lines

    def _eagerly(self) -> list[str]:
        found = sorted(self.eager.items(), key=lambda item: -item[1])
        return [f"eager: {', '.join(f'{count} {reason}' for reason, count in found)}"] if found else []

    def _captured(self) -> str:
        again = f" ({self.recaptures} again)" if self.recaptures else ""
        text = f"{plural(self.captures, 'capture')}{again} in {seconds_text(self.capture_ns)}"
        if self.evictions:
            text += f", {plural(self.evictions, 'eviction')}"
        if self.state_changes:
            text += f", {plural(self.state_changes, 'change')} of the model"
        return text

    def _refusals(self) -> list[str]:
        lines = [f"batch {size} runs eager: {why}" for size, why in sorted(self.refused.items())]
        return [*lines, f"nothing is padded: {self.not_padded}"] if self.not_padded else lines


ServingPath = Literal["graph", "compiled", "eager"]


class Fallback(str, Enum):
    """Why a call was not served by a graph, where the graph runner itself has no say."""

    GRAPHS_OFF = "graphs are switched off"
    NO_GRAPHS = "the graphs could not be made"
    RAISED = "the optimised path raised"
    UNKNOWN_MODEL = "not a model of this compiler"
    CLEANED_UP = "cleaned up"
    CAPTURING = "inside of a capture"


class DegradeReason(str, Enum):
    """What became of an optimisation as a whole; said once, with the cause."""

    NOT_COMPILED = "not compiled"
    CODE_DIFFERS = "compiled code not used"
    CODE_DROPPED = "compiled code dropped"
    NOT_CAPTURED = "not captured"
    NOT_PADDED = "not padded"
    NOT_SERVED = "not served"


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceResult:
    """The answer to one call, what gave it, and why it was no graph."""

    output: Any
    path: ServingPath
    reason: str = ""
    """Empty for a graph; the same words that the statistics count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatistics:
    """What one model of a compiler has served so far."""

    name: str
    mode: str
    """As it was asked for."""
    compile_mode: CompileMode
    """What that means here."""
    device: str
    """``cuda:0`` or ``cpu``; empty when no device could be opened."""
    paths: Mapping[ServingPath, int]
    reasons: Mapping[str, int]
    """Why calls were not served by a graph."""
    padded: int
    """Calls of the graphs that were padded to the next batch size."""
    compiled_sizes: tuple[int, ...]
    """Batch sizes with compiled code, proven to give eager's answers."""
    compile_ns: int
    """Time spent on compiling, a failed one included."""
    capture_ns: int
    """Time spent on captures and their proofs."""
    memory_bytes: Mapping[int, int | None]
    """Of each graph there is now, by batch size; None where the device cannot tell."""
    notes: tuple[str, ...]
    """What could not be optimised, and what became of the rest; in the words of the log."""

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
        found = sorted(self.reasons.items(), key=lambda item: -item[1])
        return [f"  no graph: {', '.join(f'{count} {reason}' for reason, count in found)}"] if found else []

    def _made(self) -> str:
        known = [count for count in self.memory_bytes.values() if count is not None]
        graphs = f"batch {', '.join(map(str, sorted(self.memory_bytes)))}" if self.memory_bytes else "none"
        memory = f", {bytes_text(sum(known))}" if known else ""
        compiled = f"; compiled: batch {', '.join(map(str, self.compiled_sizes))}" if self.compiled_sizes else ""
        times = f"; compile {seconds_text(self.compile_ns)}, capture {seconds_text(self.capture_ns)}"
        return f"  graphs: {graphs}{memory}{compiled}{times}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerStatistics:
    """What an :class:`IntegratedAOTCompiler` has served so far: its living models, and calls of other ones."""

    models: tuple[ModelStatistics, ...]
    unknown: int
    """Calls of models that it was never asked to compile; they ran eager."""

    @property
    def paths(self) -> Mapping[ServingPath, int]:
        """The calls of all models by what served them, the unknown ones among the eager."""
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
"""Messages may hold a number that is another one each time."""


class EventLog:
    """The counters and notes of one model; whoever writes holds its lock."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._notes: dict[str, None] = {}  # a set that keeps its order
        self.paths: Counter[ServingPath] = Counter()
        self.reasons: Counter[str] = Counter()

    @property
    def notes(self) -> tuple[str, ...]:
        """Every setback so far, each once."""
        return tuple(self._notes)

    def count(self, path: ServingPath, reason: str) -> None:
        """One call has been served."""
        self.paths[path] += 1
        if reason:
            self.reasons[reason] += 1
            if self.reasons[reason] == 1:
                _log.warning("%s: a call runs %s: %s (said once, counted from now on)", self._name, path, reason)

    def say(self, setback: DegradeReason, why: str | BaseException) -> None:
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
