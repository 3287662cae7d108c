"""What may be said of a batch size, and by which gate."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

GateName = Literal["eager", "audit", "compile", "capture", "check", "speedup", "baseline", "structure", "base"]


class Verdict(str, Enum):
    """What a test has shown of one batch size, or of the whole test (the worst of its batch sizes)."""

    PASSED = "passed"
    NOT_JUDGED = "not-judged"
    INCONCLUSIVE = "inconclusive"
    FAILED = "failed"
    WRONG = "wrong"
    NOT_CAPTURED = "not-captured"

    @property
    def severity(self) -> int:
        """0 for passed, rising to the worst."""
        return list(Verdict).index(self)

    @property
    def fails(self) -> bool:
        """Whether a test with this verdict fails without strict mode."""
        return self in (Verdict.FAILED, Verdict.WRONG, Verdict.NOT_CAPTURED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What one gate says of one batch size: a sentence (allowed, found), its evidence, its remedy."""

    gate: GateName
    verdict: Verdict
    reason: str
    evidence: tuple[str, ...] = ()
    remedy: str = ""
    accept: float | None = None
    """What the gate's setting would have to be for what was found to pass; None where no setting is the remedy."""
    hazard: str = ""
    """The id in the catalogue, where a hazard of the model is the cause; its page tells more."""
