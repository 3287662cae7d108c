"""The interface of an engine that runs in two modes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from pytest_cudagraph.decoding.results import GenerationReceipt


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """What an engine is loaded for."""

    graphs: bool
    """False: the eager mode."""
    rows: int
    """Prompts of each generation."""
    device: str
    """``cuda:0`` or ``cpu``: the device of the test run."""
    threads: int
    """Of torch on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What a loaded engine tells of itself. None: it does not tell."""

    capture_ns: int | None = None
    capture_bytes: int | None = None
    """Of the graphs, on the device."""
    receipt: GenerationReceipt | None = None
    """Of the decode steps of all generations so far. What the first generation adds is not judged: it may capture."""


class LoadedEngine(Protocol):
    """One mode, ready to generate."""

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int
    ) -> Iterable[Mapping[int, Sequence[int] | Exception]]:
        """Generate ``count`` tokens greedily for each prompt (token ids).

        Yield the new tokens by row as soon as they are on the host: that is when they are timed. A row that gets no
        token in a step may be left out. An exception says that the request of the row has failed.
        """
        ...

    def facts(self) -> EngineFacts:
        """What the engine tells, after its first generation and again after its last one."""
        ...

    def close(self) -> None:
        """Free what the engine holds."""
        ...


@runtime_checkable
class Engine(Protocol):
    """An engine as a value: it is pickled and loaded in the process of each mode. So it holds arguments, no model."""

    @property
    def name(self) -> str:
        """Of the engine and its model, for reports."""
        ...

    def load(self, request: LoadRequest, **arguments: Any) -> LoadedEngine:
        """Load the mode. ``arguments`` are those of ``eager=`` or ``graphs=``. What it raises is shown as it is.

        An error with graphs is a fallback: serving code can catch it and load the eager mode.
        """
        ...
