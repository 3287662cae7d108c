"""Statistics of a measurement: summaries, the stopping rules, and the selection of undisturbed blocks."""

from pytest_cudagraph.stats.betting import STAKES, Scorer, evidence
from pytest_cudagraph.stats.evidence_rule import EvidenceRule, FixedTimeRule, blocks_judged_by
from pytest_cudagraph.stats.undisturbed import SelectedBlocks
