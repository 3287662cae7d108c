"""The result of one gate: a verdict with its reason, evidence and remedy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(str, Enum):
    """The result of one batch size, or of a whole test (the worst of its batch sizes)."""

    PASSED = "passed"
    NOT_JUDGED = "not-judged"
    INCONCLUSIVE = "inconclusive"
    FAILED = "failed"
    WRONG = "wrong"
    NOT_CAPTURED = "not-captured"

    @property
    def severity(self) -> int:
        """0 for passed, higher for worse."""
        return list(Verdict).index(self)

    @property
    def fails(self) -> bool:
        """Whether a test with this verdict fails without strict mode."""
        return self in (Verdict.FAILED, Verdict.WRONG, Verdict.NOT_CAPTURED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """One gate's result: a sentence (allowed, found), its evidence and its remedy."""

    gate: str
    """Its name: one of the core, or of a feature."""
    verdict: Verdict
    reason: str
    evidence: tuple[str, ...] = ()
    remedy: str = ""
    accept: float | None = None
    """The setting of the gate that would let the result pass. None if no setting is the remedy."""
    hazard: str = ""
    """The hazard's id in the catalogue, if a hazard is the cause."""
