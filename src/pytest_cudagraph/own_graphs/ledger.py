"""The ledger: one record per captured graph, one per marked call, and what can be read from them."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from pytest_cudagraph.units import bytes_text, plural
from pytest_cudagraph.values import Site

CallKind = Literal["capture", "replay", "replay and eager", "eager", "nothing"]


@dataclass(slots=True, kw_only=True, eq=False)
class MemoryUse:
    """Memory that existed before a capture and that the graph uses: its first use, and whether its owner is gone."""

    size_bytes: int
    operator: str
    """The first operator of the capture that used it."""
    site: Site | None
    """The user's line of that operator."""
    address: int = 0
    is_host: bool = False
    is_parameter: bool = False
    is_freed: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class GraphRecord:
    """One captured graph. It is filled while the program runs."""

    ledger: GraphLedger = field(repr=False)
    number: int
    """Counted from 0 in the ledger."""
    site: Site | None
    """The user's line that captured it."""
    stream: int = 0
    operators: list[tuple[str, tuple[tuple[int, ...], ...]]] = field(default_factory=list)
    """The name and the shapes of the results of each operator in the capture."""
    memory: dict[int, MemoryUse] = field(default_factory=dict)
    """What it uses of the memory from before the capture, by the identity of the storage."""
    watches_memory: bool = True
    """False for cudagraph trees: they capture on other tensor objects of the same memory, and check it themselves."""
    nodes: int | None = None
    kernel_names: Mapping[str, int] = field(default_factory=dict)
    why_not_counted: str = ""
    pool_bytes: int = 0
    """What the capture added to the memory reserved on the device."""
    capture_ns: int = 0
    replays: int = 0
    freed_replays: int = 0
    """Replays after memory that the graph uses was freed."""
    has_freed: bool = False
    """Whether some of the memory that it uses was freed."""
    is_closed: bool = False
    failure: str = ""
    """The first line of the error that refused the capture."""
    references: list[weakref.ref[object]] = field(default_factory=list, repr=False)
    """They tell when memory is freed, as long as they are held."""

    @property
    def program(self) -> tuple[object, ...]:
        """Equal for two captures of the same code, on the same shapes, with the same parameters."""
        parameters = frozenset(key for key, use in self.memory.items() if use.is_parameter)
        return (str(self.site), tuple(self.operators), parameters)

    @property
    def freed(self) -> list[MemoryUse]:
        """Memory that the graph uses and that nobody owns any more."""
        return [use for use in self.memory.values() if use.is_freed]

    def line(self) -> str:
        """``graph 2 at model.py:20: 14 operators, 2.0 MiB, 340 replays``."""
        work = plural(self.nodes, "node") if self.nodes is not None else plural(len(self.operators), "operator")
        parts = [work, bytes_text(self.pool_bytes), plural(self.replays, "replay")]
        parts += ["closed"] if self.is_closed else []
        parts += [f"refused: {self.failure}"] if self.failure else []
        return f"graph {self.number} at {self.site or 'an unknown line'}: {', '.join(parts)}"


@dataclass(slots=True, kw_only=True, eq=False)
class WatchedCall:
    """What one marked call did on the device."""

    label: str
    captures: int = 0
    replays: int = 0
    eager: Counter[str] = field(default_factory=Counter)
    """Operators that ran outside of graphs, without copies and views."""
    sites: dict[str, Site | None] = field(default_factory=dict)
    """The user's first line of each of these operators."""

    @property
    def kind(self) -> CallKind:
        """The kind of the call, by what it launched."""
        if self.captures:
            return "capture"
        if self.replays:
            return "replay and eager" if self.eager else "replay"
        return "eager" if self.eager else "nothing"


@dataclass(slots=True, kw_only=True, eq=False)
class GraphLedger:
    """Every graph captured while the watch was on, and every call that was marked with ``call()``."""

    graphs: list[GraphRecord] = field(default_factory=list)
    calls: list[WatchedCall] = field(default_factory=list)
    unknown_replays: int = 0
    """Replays of graphs that were captured before the watch was on. Nothing else is known of them."""

    @property
    def captures(self) -> int:
        """Captures that succeeded."""
        return sum(not graph.failure for graph in self.graphs)

    @property
    def replays(self) -> int:
        """All replays, those of unknown graphs too."""
        return sum(graph.replays for graph in self.graphs) + self.unknown_replays

    @property
    def recaptures(self) -> list[GraphRecord]:
        """Captures of what a graph before holds already: the same line, operators, shapes and parameters."""
        seen: set[tuple[object, ...]] = set()
        again = []
        for graph in (graph for graph in self.graphs if not graph.failure):
            again += [graph] if graph.program in seen else []
            seen.add(graph.program)
        return again

    @property
    def refused(self) -> list[GraphRecord]:
        """Captures that ended with an error."""
        return [graph for graph in self.graphs if graph.failure]

    @property
    def freed(self) -> list[GraphRecord]:
        """Graphs that were replayed after memory that they use was freed."""
        return [graph for graph in self.graphs if graph.freed_replays]

    @property
    def eager_calls(self) -> list[WatchedCall]:
        """Marked calls that ran on the device without any graph."""
        return [call for call in self.calls if call.kind == "eager"]

    def lines(self) -> list[str]:
        """The ledger as text: a line of counts, a line for each graph, and a line for each cause of trouble."""
        return [self.summary(), *(graph.line() for graph in self.graphs), *self._troubles()]

    def summary(self) -> str:
        """``3 captures, 340 replays, 1 recapture``, and the kinds of the marked calls."""
        parts = [plural(self.captures, "capture"), plural(self.replays, "replay")]
        for number, word in ((len(self.recaptures), "recapture"), (len(self.refused), "refused capture")):
            parts += [plural(number, word)] if number else []
        freed = sum(graph.freed_replays for graph in self.graphs)
        parts += [f"{plural(freed, 'replay')} after memory of the graph was freed"] if freed else []
        if self.unknown_replays:
            parts.append(f"{plural(self.unknown_replays, 'replay')} of graphs captured before the watch")
        return ", ".join(parts) + _kinds(self.calls)

    def _troubles(self) -> Iterable[str]:
        for graph in self.recaptures:
            yield f"graph {graph.number} at {graph.site} holds what an earlier graph holds: keep that one"
        for graph in self.freed:
            for use in graph.freed:
                yield (
                    f"graph {graph.number} was replayed {plural(graph.freed_replays, 'time')} after "
                    f"{bytes_text(use.size_bytes)} that it uses were freed: {use.operator} at {use.site}; "
                    "keep the tensor as long as the graph"
                )
        for call in self.eager_calls:
            operator, site = next(iter(call.sites.items()))
            work = plural(call.eager.total(), "operator")
            yield f"call {call.label} ran without a graph: {work}, {operator} at {site}"


def _kinds(calls: Iterable[WatchedCall]) -> str:
    kinds = Counter(call.kind for call in calls)
    if not kinds:
        return ""
    return f"; {plural(kinds.total(), 'call')}: {', '.join(f'{number} {kind}' for kind, number in kinds.items())}"
