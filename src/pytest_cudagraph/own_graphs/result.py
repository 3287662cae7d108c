"""What a proof of a program's own graphs leaves: a scenario with its table, and its judgement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from pytest_cudagraph.errors import GraphTestFailure
from pytest_cudagraph.own_graphs.trouble import Trouble
from pytest_cudagraph.units import bytes_text, plural
from pytest_cudagraph.values import Column, Judgement, Table, Verdict

GATE = "own graphs"

_NOT_CAPTURED = frozenset({"not-captured", "no-graph", "eager-fallback"})
_FAILED = frozenset({"recaptures", "memory-growth"})

_COLUMNS = ("batch", "calls", "graphs", "captures", "replays", "pool")


class OwnGraphsFailed(GraphTestFailure):
    """A program's own graphs are wrong, are not used, or take more and more memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnGraphs:
    """The graphs of one proof, as one batch size shows them."""

    batch_size: int
    calls: int
    """Calls of the runner that were compared with eager, over all sizes."""
    graphs: int
    """Graphs that were replayed."""
    captures: int
    replays: int
    pool_bytes: int
    """What all captures added to the memory reserved on the device."""

    kind: ClassVar[str] = "own_graphs"
    has_entry: ClassVar[bool] = True

    def tables(self, test: str) -> tuple[Table, ...]:
        """One row."""
        columns = (Column(title="test", right=False), *(Column(title=title) for title in _COLUMNS))
        counts = map(str, (self.batch_size, self.calls, self.graphs, self.captures, self.replays))
        return (Table(title="own graphs", columns=columns, rows=((test, *counts, bytes_text(self.pool_bytes)),)),)

    def document(self) -> dict[str, Any]:
        """Its attributes."""
        return asdict(self)

    def properties(self) -> dict[str, str]:
        """The number of captures."""
        return {"captures": str(self.captures)}


def judge_proof(trouble: Trouble | None, calls: int, captures: int, ledger: Sequence[str]) -> Judgement:
    """Passed without trouble, else wrong, not captured or failed, with the ledger as evidence."""
    if trouble is None:
        reason = f"{plural(calls, 'call')} equal eager's, by {plural(captures, 'graph')} of the runner"
        return Judgement(gate=GATE, verdict=Verdict.PASSED, reason=reason)
    finding = trouble.finding
    verdict = Verdict.WRONG
    if finding.id in _NOT_CAPTURED:
        verdict = Verdict.NOT_CAPTURED
    elif finding.id in _FAILED:
        verdict = Verdict.FAILED
    place = f"{finding.site}: " if finding.site else ""
    evidence = tuple(line for line in (finding.evidence, *ledger) if line)
    reason = f"{place}{finding.message} [{finding.id}]"
    return Judgement(gate=GATE, verdict=verdict, reason=reason, evidence=evidence, remedy=f"fix: {finding.fix}")


def not_judged(device: str) -> Judgement:
    """The judgement where graphs cannot be captured."""
    return Judgement(
        gate=GATE,
        verdict=Verdict.NOT_JUDGED,
        reason=f"a runner's own graphs need a CUDA device; this run is on {device}, and the runner was not made",
    )
