"""Numbers to numbers: summaries, the stopping rule, and the blocks it may trust."""

from pytest_cudagraph.stats.betting import STAKES, Scorer, evidence
from pytest_cudagraph.stats.evidence_rule import EvidenceRule, FixedTimeRule, judged
from pytest_cudagraph.stats.undisturbed import SelectedBlocks

__all__ = ["STAKES", "EvidenceRule", "FixedTimeRule", "Scorer", "SelectedBlocks", "evidence", "judged"]
