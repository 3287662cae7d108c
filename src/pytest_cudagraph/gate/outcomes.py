"""Findings, failed compiles, refused captures and wrong replays, as judgements."""

from __future__ import annotations

from pytest_cudagraph.errors import CaptureRefusal, CudagraphError
from pytest_cudagraph.units import bytes_text, plural, seconds_text
from pytest_cudagraph.values import Agreement, Disagreement, Finding, Judgement, Receipt, Verdict


def judge_finding(finding: Finding) -> Judgement:
    """A finding of the audit: not captured if CUDA refuses it, wrong if the graph would replay wrongly."""
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
    """A compile that raised an error or exceeded its time limit. Nothing can be captured."""
    first, *rest = str(error).splitlines() or [type(error).__name__]
    return Judgement(
        gate="compile", verdict=Verdict.NOT_CAPTURED, reason=first, evidence=tuple(line.strip() for line in rest)
    )


def judge_agreement(found: Agreement | Disagreement, *, places: tuple[str, ...] = (), fix: str = "") -> Judgement:
    """Wrong if any replay differed from eager in an output or in state.

    ``places`` are the model's lines that cause it, ``fix`` is the remedy.
    """
    if isinstance(found, Disagreement):
        return _disagreement(found, places, fix)
    exactly = "bit for bit" if found.bit_exact else "within tolerance"
    evidence = [*found.warnings, *found.notes]
    if found.adversaries:
        evidence.append(f"the inputs were fresh ones, and: {', '.join(found.adversaries)}")
    if not found.eager_repeatable:
        evidence.append("eager itself did not give the same bits twice")
    if found.not_compared:
        evidence.append(f"not compared: {', '.join(found.not_compared)}")
    return Judgement(
        gate="check",
        verdict=Verdict.PASSED,
        reason=f"replay equals eager {exactly} in {plural(found.replays, 'replay')}: "
        f"{plural(found.leaves, 'output tensor')}, {plural(found.state_tensors, 'state tensor')}",
        evidence=tuple(evidence),
    )


def _disagreement(found: Disagreement, places: tuple[str, ...], fix: str) -> Judgement:
    cause = (f"hazard {found.finding_id}",) if found.finding_id else ()
    return Judgement(
        gate="check",
        verdict=Verdict.WRONG,
        reason=f"replay differs from eager in {found.where}: {found.message}",
        evidence=(*found.evidence, *places, *cause),
        remedy=fix,
        hazard=found.finding_id or "",
    )


def judge_capture(receipt: Receipt) -> Judgement:
    """Passed with the receipt's figures. Not captured if the graph is empty."""
    if receipt.kernels == 0:
        return Judgement(
            gate="capture",
            verdict=Verdict.NOT_CAPTURED,
            reason="the captured graph is empty: a replay launches no kernel",
            remedy="give the fixture a callable that computes on its inputs with torch",
        )
    size = "" if receipt.kernels is None else f"{plural(receipt.kernels, 'kernel')}, "
    memory = "" if receipt.memory_bytes is None else f"{bytes_text(receipt.memory_bytes)}, "
    regions = receipt.opaque_regions
    counted = "counts as one kernel" if regions == 1 else "count as one kernel each"
    return Judgement(
        gate="capture",
        verdict=Verdict.PASSED,
        reason=f"captured: {size}{memory}{seconds_text(receipt.capture_ns)}",
        evidence=(f"{plural(regions, 'compiled region')} {counted}",) if regions else (),
    )


def refused(refusal: CaptureRefusal, *, fix: str = "") -> Judgement:
    """Not captured, with CUDA's message and the user's line. ``fix`` is the catalogue's remedy for the hazard."""
    evidence = [f"hazard {refusal.hazard}"] if refusal.hazard else []
    if refusal.site is not None:
        evidence.append(f"at {refusal.site}")
    operation = f" in {refusal.operation}" if refusal.operation else ""
    return Judgement(
        gate="capture",
        verdict=Verdict.NOT_CAPTURED,
        reason=f"the capture was refused{operation}: {refusal.text}",
        evidence=tuple(evidence),
        remedy=fix,
        hazard=refusal.hazard,
    )
