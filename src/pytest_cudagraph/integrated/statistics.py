"""How one call was served, and what a compiler has served so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from pytest_cudagraph.units import bytes_text, plural, seconds_text
from pytest_cudagraph.values import CompileMode

Path = Literal["graph", "compiled", "eager"]


class Fallback(str, Enum):
    """Why a call was not served by a graph, where the graph runner itself has no say."""

    GRAPHS_OFF = "graphs are switched off"
    NO_GRAPHS = "the graphs could not be made"
    RAISED = "the optimised path raised"
    UNKNOWN_MODEL = "not a model of this compiler"
    CLEANED_UP = "cleaned up"
    CAPTURING = "inside of a capture"


class Setback(str, Enum):
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
    path: Path
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
    paths: Mapping[Path, int]
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
    def paths(self) -> Mapping[Path, int]:
        """The calls of all models by what served them, the unknown ones among the eager."""
        unknown: dict[Path, int] = {"graph": 0, "compiled": 0, "eager": self.unknown}
        return {path: count + sum(model.paths.get(path, 0) for model in self.models) for path, count in unknown.items()}

    @property
    def calls(self) -> int:
        """All calls."""
        return sum(self.paths.values())

    def lines(self) -> list[str]:
        """The same in words."""
        unknown = [f"{plural(self.unknown, 'call')} of other models: eager"] if self.unknown else []
        return [line for model in self.models for line in model.lines()] + unknown
