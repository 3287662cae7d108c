"""What a runner has served, and how: counted while it runs, frozen for a reader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from pytest_cudagraph.units import bytes_text, plural, seconds_text


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
