"""What ends a story before anything is captured: a hazard in the eager model, a compile that failed."""

from __future__ import annotations

from pytest_cudagraph.errors import CudagraphError
from pytest_cudagraph.values import Finding, Judgement, Verdict


def judge_finding(finding: Finding) -> Judgement:
    """An error of the audit: not captured where CUDA itself refuses, wrong where it would replay silently."""
    where = f"{finding.site}: " if finding.site else ""
    return Judgement(
        gate="audit",
        verdict=Verdict.NOT_CAPTURED if finding.loud else Verdict.WRONG,
        reason=f"{where}{finding.message} [{finding.id}]",
        evidence=tuple(line for line in (finding.evidence, _caller(finding)) if line),
        remedy=f"fix: {finding.fix}",
        hazard=finding.id,
    )


def _caller(finding: Finding) -> str:
    caller = finding.called_from
    return "" if caller is None else f"called from {caller}{f' in {caller.function}' if caller.function else ''}"


def judge_compile_failure(error: CudagraphError) -> Judgement:
    """A compile that raised or ran past its time: there is nothing to capture."""
    first, *rest = str(error).splitlines() or [type(error).__name__]
    return Judgement(
        gate="compile", verdict=Verdict.NOT_CAPTURED, reason=first, evidence=tuple(line.strip() for line in rest)
    )
