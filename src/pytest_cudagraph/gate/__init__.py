"""Judge the facts of one batch size: pure functions from values to judgements.

A judgement is one sentence (found, allowed), its evidence and its remedy. The report adds the batch size and the
device: the sentences here follow after "batch 8:".
"""

from pytest_cudagraph.gate.latency import interval_basis_text, judge_baseline, judge_figures
from pytest_cudagraph.gate.outcomes import (
    judge_agreement,
    judge_capture,
    judge_compile_failure,
    judge_finding,
    judge_structure,
    refused,
)
from pytest_cudagraph.gate.speedup import judge_speedup
from pytest_cudagraph.gate.wording import FIGURES, changes_text, replaced_text
