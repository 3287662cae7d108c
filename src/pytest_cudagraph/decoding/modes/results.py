"""Two modes of an engine, eager and with graphs: the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from pytest_cudagraph.decoding.results import GenerationReceipt, GenerationTimes, table_of
from pytest_cudagraph.foreign import printable_lines
from pytest_cudagraph.units import bytes_text, latency_text, seconds_text, to_seconds
from pytest_cudagraph.values import Interval, Table

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


_MOST_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestErrors:
    """Many requests at once, and those without all of their tokens."""

    requests: int
    failed: int
    first: str = ""
    """Why the first of them failed."""

    @classmethod
    def of(cls, requests: int, errors: Mapping[str, str]) -> RequestErrors:
        """``errors`` by the number of the request, as JSON has it."""
        at = min(errors, key=int, default="")
        first = f"request {at}: {printable_lines(errors[at])[:_MOST_CHARACTERS]}" if errors else ""
        return cls(requests=requests, failed=len(errors), first=first)

    @property
    def rate(self) -> float:
        """Failed requests of all."""
        return self.failed / self.requests


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMode:
    """One mode, measured in a process of its own. None where it failed before, or where nobody tells."""

    load_ns: int | None = None
    """From nothing to an engine that can generate. It includes the capture."""
    capture_ns: int | None = None
    """Of the graphs. None if the engine does not tell."""
    capture_bytes: int | None = None
    """Of the graphs, on the device. None if the engine does not tell."""
    host_bytes: int | None = None
    """Resident memory of the process and of those that it started, after the last generation."""
    device_bytes: int | None = None
    """By how much the used memory of all GPUs grew from before the load. None without NVML."""
    times: GenerationTimes | None = None
    itl_medians_ns: tuple[float, ...] = ()
    """The median inter-token latency of each generation."""
    receipt: GenerationReceipt | None = None
    """Of all decode steps. None if the engine does not tell."""
    waited_ratio: float | None = None
    """The share of their time that its threads waited for a core in the generations. None where nobody tells."""
    errors: RequestErrors | None = None
    """Of many requests at once. None unless the test asks."""
    failure: ModeFailure | None = None
    output: tuple[str, ...] = ()
    """What the process printed about graphs, else the end of what it printed. Empty after a failure, which has it."""

    def texts(self) -> tuple[str, ...]:
        """Its part of a row."""
        times, receipt = self.times, self.receipt
        replays = "failed" if self.failure else "not told" if receipt is None else receipt.text
        return (
            "-" if self.load_ns is None else seconds_text(self.load_ns),
            self._capture_text(),
            "-" if self.host_bytes is None else bytes_text(self.host_bytes),
            "-" if self.device_bytes is None else bytes_text(self.device_bytes),
            "-" if times is None else latency_text(times.ttft.median_ns),
            "-" if times is None else latency_text(times.itl.median_ns),
            "-" if times is None else f"{times.tokens_per_second:.0f}",
            replays,
            "-" if self.errors is None else f"{self.errors.failed}/{self.errors.requests}",
        )

    def _capture_text(self) -> str:
        took = "-" if self.capture_ns is None else seconds_text(self.capture_ns)
        return took if self.capture_bytes is None else f"{took}, {bytes_text(self.capture_bytes)}"

    def _taken(self) -> dict[str, float | None]:
        return {
            "load_seconds": None if self.load_ns is None else to_seconds(self.load_ns),
            "capture_seconds": None if self.capture_ns is None else to_seconds(self.capture_ns),
            "capture_bytes": self.capture_bytes,
            "host_bytes": self.host_bytes,
            "device_bytes": self.device_bytes,
        }

    def document(self) -> dict[str, Any]:
        """Its attributes, with times in seconds."""
        return {
            **self._taken(),
            "times": self.times and self.times.document(),
            "itl_medians": [to_seconds(median_ns) for median_ns in self.itl_medians_ns],
            "waited_ratio": self.waited_ratio,
            "receipt": self.receipt and asdict(self.receipt),
            "errors": self.errors and asdict(self.errors),
            "failure": self.failure and asdict(self.failure),
        }

    def properties(self) -> dict[str, str]:
        """What it took, for JUnit."""
        taken = {key: f"{value:.4g}" for key, value in self._taken().items() if value is not None}
        return taken | (self.times.properties() if self.times else {})


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
    rounds: int = 1
    """Processes of each mode, in turn."""
    tokens: ModeTokens | None = None
    """None unless both modes generated."""
    speedup: Interval | None = None
    """Eager's inter-token latency over that of graphs. The bounds are the extremes of single generations.

    They are wider where other work had the cores, by what a mode waited.
    """

    keeps_entry: bool = True
    """False in a comparison of revisions, which loads no engine."""

    kind: ClassVar[str] = "modes"

    @property
    def has_entry(self) -> bool:
        """Whether both modes were timed."""
        return self.speedup is not None and self.keeps_entry

    @property
    def _named(self) -> dict[str, EngineMode]:
        return {"eager": self.eager, "graphs": self.graphs}

    def tables(self, test: str) -> tuple[Table, ...]:
        """Two rows, eager and graphs."""
        titles = "mode|load|capture|host|device|TTFT|ITL|tokens/s|replays|errors"
        return table_of("engine modes", titles, [(test, name, *mode.texts()) for name, mode in self._named.items()])

    def document(self) -> dict[str, Any]:
        """Both modes, with times in seconds."""
        return {
            "engine": self.engine,
            "output_length": self.output_length,
            "rounds": self.rounds,
            "tokens": self.tokens and asdict(self.tokens),
            "speedup": self.speedup and asdict(self.speedup),
            **{name: mode.document() for name, mode in self._named.items()},
        }

    def properties(self) -> dict[str, str]:
        """``speedup``, ``graphs_load_seconds``, ``graphs_host_bytes``, ``graphs_itl_seconds`` and so on."""
        speedup = {} if self.speedup is None else {"speedup": f"{self.speedup.estimate:.2f}"}
        modes = self._named.items()
        return speedup | {f"{name}_{key}": text for name, mode in modes for key, text in mode.properties().items()}
