"""How a runner served its calls: its counters, and their frozen copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from pytest_cudagraph.units import bytes_text, plural, seconds_text


class NoGraphReason(str, Enum):
    """Why no graph served a call: first the reasons of a runner, then those of the drop-in compiler."""

    NO_ROWS = "no rows"
    TOO_LARGE = "beyond the largest batch size"
    OTHER_ARGUMENT = "other argument"
    OTHER_SHAPE = "other shape or dtype"
    OTHER_AUTOCAST = "other autocast"
    REFUSED = "capture refused"
    NOT_PADDED = "outputs cannot be cut"
    MIXED_ROWS = "rows depend on each other"
    PADDED_STATE = "padding would change state"
    PADDING_OFF = "padding is switched off"
    GRAPHS_OFF = "graphs are switched off"
    NO_GRAPHS = "the graphs could not be made"
    RAISED = "the optimised path raised"
    UNKNOWN_MODEL = "not a model of this compiler"
    CLEANED_UP = "cleaned up"
    CAPTURING = "inside of a capture"


@dataclass(slots=True)
class Tally:
    """The counters of one runner. A writer holds the runner's lock."""

    padded: int = 0
    padding_rows: int = 0
    captures: int = 0
    recaptures: int = 0
    evictions: int = 0
    state_changes: int = 0
    capture_ns: int = 0
    eager: Counter[NoGraphReason] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormStatistics:
    """The calls that graphs of one form have served so far."""

    form: str
    """The arguments in words: ``args[0] int64 (rows, 5)``."""
    replays: Mapping[int, int]
    """Calls by the batch size of the graph that served them."""
    memory_bytes: Mapping[int, int | None]
    """Memory that each present graph added to the pool, by batch size; None where the backend cannot tell."""
    refused: Mapping[int, str]
    """Batch sizes whose capture was refused, with the reason."""
    not_padded: str = ""
    """Why no call is padded; empty if calls are padded."""

    def lines(self) -> list[str]:
        """Each batch size in words."""
        lines = []
        for size in sorted({*self.replays, *self.memory_bytes}):
            memory = self.memory_bytes.get(size)
            held = "no graph now" if size not in self.memory_bytes else "" if memory is None else bytes_text(memory)
            replays = plural(self.replays.get(size, 0), "replay")
            lines.append(f"  batch {size}: {replays}{f', {held}' if held else ''}")
        return lines

    def refusals(self) -> list[str]:
        """What runs eager, in words."""
        lines = [f"batch {size} runs eager: {why}" for size, why in sorted(self.refused.items())]
        return [*lines, f"nothing is padded: {self.not_padded}"] if self.not_padded else lines


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerStatistics:
    """The calls that a :class:`GraphRunner` has served so far."""

    device: str
    hits: int
    """Calls whose batch size has a graph."""
    padded: int
    """Calls that were padded to the next batch size with a graph."""
    padding_rows: int
    """Rows that padding added, in all padded calls."""
    eager: Mapping[str, int]
    """Calls that ran the model itself, by reason."""
    forms: tuple[FormStatistics, ...]
    """The forms of calls that have graphs: that of the runner's own example, then those added by ``also``."""
    captures: int
    recaptures: int
    """Captures of a batch size whose earlier graph was evicted, or dropped after a change of the model."""
    evictions: int
    state_changes: int
    """How often the model had changed, which drops all graphs."""
    capture_ns: int
    """Time of all captures, with their warm-up; refused captures are included."""

    @property
    def calls(self) -> int:
        """The number of all calls."""
        return self.hits + self.padded + sum(self.eager.values())

    @property
    def replays(self) -> Mapping[int, int]:
        """Calls by the batch size of the graph that served them, of all forms."""
        return dict(sum((Counter(form.replays) for form in self.forms), Counter()))

    @property
    def memory_bytes(self) -> Mapping[int, int | None]:
        """Memory of the present graphs by batch size, of all forms; None where the backend cannot tell."""
        total: dict[int, int | None] = {}
        for size, memory in (item for form in self.forms for item in form.memory_bytes.items()):
            before = total.get(size, 0)
            total[size] = None if memory is None or before is None else before + memory
        return total

    @property
    def refused(self) -> Mapping[int, str]:
        """Batch sizes whose capture was refused, with the reason, of the first form where it was."""
        return {size: why for form in reversed(self.forms) for size, why in form.refused.items()}

    @property
    def not_padded(self) -> str:
        """Why no call of the first such form is padded; empty if calls of all forms are padded."""
        return next((form.not_padded for form in self.forms if form.not_padded), "")

    def lines(self) -> list[str]:
        """The same in words."""
        graphs = [line for form in self.forms for line in (*self._heading(form), *form.lines())]
        refusals = [line for form in self.forms for line in form.refusals()]
        return [self._served(), *graphs, *self._eagerly(), self._captured(), *refusals]

    def _served(self) -> str:
        padding = f" ({plural(self.padding_rows, 'row')} of padding)" if self.padded else ""
        eager = sum(self.eager.values())
        served = f"{self.hits} exact, {self.padded} padded{padding}, {eager} eager"
        return f"{plural(self.calls, 'call')} on {self.device}: {served}"

    def _heading(self, form: FormStatistics) -> list[str]:
        return [form.form] if len(self.forms) > 1 else []

    def _eagerly(self) -> list[str]:
        return [f"eager: {reasons_text(self.eager)}"] if self.eager else []

    def _captured(self) -> str:
        again = f" ({self.recaptures} again)" if self.recaptures else ""
        text = f"{plural(self.captures, 'capture')}{again} in {seconds_text(self.capture_ns)}"
        if self.evictions:
            text += f", {plural(self.evictions, 'eviction')}"
        if self.state_changes:
            text += f", {plural(self.state_changes, 'change')} of the model"
        return text


def reasons_text(reasons: Mapping[str, int]) -> str:
    """``20 no rows, 3 other argument``: the most frequent first."""
    return ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items(), key=lambda item: -item[1]))
