"""Two modes of an engine, eager and with graphs: what each took, and whether their tokens are equal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pytest_cudagraph.decoding.results import GenerationReceipt, GenerationTimes
from pytest_cudagraph.values.timings import Interval

Stage = Literal["start", "load", "generate", "close"]
"""What the process of a mode did when it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeFailure:
    """Why a mode gave no result."""

    stage: Stage
    error: str
    """The engine's own error (``RuntimeError: ...``), or how its process ended."""
    is_raised: bool
    """Whether the engine raised it. Serving code can catch that, and load the engine without graphs."""
    output: tuple[str, ...] = ()
    """The end of what the process printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMode:
    """One mode, measured in a process of its own. None where it failed before, or where nobody tells."""

    load_ns: int | None = None
    """From nothing to an engine that can generate. It includes the capture."""
    capture_ns: int | None = None
    """Of the graphs. None if the engine does not tell."""
    host_bytes: int | None = None
    """Resident memory of the process and of those that it started, after the last generation."""
    device_bytes: int | None = None
    """By how much the used memory of all GPUs grew from before the load. None without NVML."""
    times: GenerationTimes | None = None
    itl_medians_ns: tuple[float, ...] = ()
    """The median inter-token latency of each generation."""
    receipt: GenerationReceipt | None = None
    """Of all decode steps. None if the engine does not tell."""
    failure: ModeFailure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeTokens:
    """The tokens of graphs compared with eager's, row by row."""

    rows: int
    differing_rows: int
    """Rows with another token in any generation. The first other token changes all later ones."""
    row: int | None = None
    """The first difference in the first differing row."""
    position: int | None = None
    """Counted from the first generated token, 0."""
    expected: int | None = None
    found: int | None = None
    eager_repeats: bool = True
    """Whether eager gives the same tokens in each of its generations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModes:
    """An engine in both modes, with the same prompts."""

    engine: str
    batch_size: int
    output_length: int
    eager: EngineMode
    graphs: EngineMode
    tokens: ModeTokens | None = None
    """None unless both modes generated."""
    speedup: Interval | None = None
    """Eager's inter-token latency over that of graphs. The bounds are the extremes of single generations."""
