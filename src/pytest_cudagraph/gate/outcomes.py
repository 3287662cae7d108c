"""Findings, failed compiles, refused captures, wrong replays and counts of kernels, as judgements."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_cudagraph.errors import CaptureRefusal, CudagraphError
from pytest_cudagraph.gate.wording import changes_text, software_changes
from pytest_cudagraph.units import bytes_text, plural, seconds_text
from pytest_cudagraph.values import (
    Agreement,
    Disagreement,
    Finding,
    Judgement,
    MeasuredBatch,
    NoBaseline,
    Receipt,
    Verdict,
)


def judge_finding(finding: Finding) -> Judgement:
    """A finding of the audit: not captured if CUDA refuses it, wrong if the graph would replay wrongly."""
    where, caller = f"{finding.site}: " if finding.site else "", finding.called_from
    calling = f"called from {caller}{f' in {caller.function}' if caller.function else ''}" if caller else ""
    return Judgement(
        gate="audit",
        verdict=Verdict.NOT_CAPTURED if finding.loud else Verdict.WRONG,
        reason=f"{where}{finding.message} [{finding.id}]",
        evidence=tuple(filter(None, (finding.evidence, calling))),
        remedy=f"fix: {finding.fix}",
        hazard=finding.id,
    )


def judge_compile_failure(error: CudagraphError) -> Judgement:
    """A compile that raised an error or exceeded its time limit. Nothing can be captured."""
    first, *rest = str(error).splitlines() or [type(error).__name__]
    return Judgement(
        gate="compile", verdict=Verdict.NOT_CAPTURED, reason=first, evidence=tuple(line.strip() for line in rest)
    )


def judge_agreement(agreement: Agreement | Disagreement, *, places: tuple[str, ...] = (), fix: str = "") -> Judgement:
    """Wrong if any replay differed from eager in an output or in state.

    ``places`` are the model's lines that cause it, ``fix`` is the remedy.
    """
    if isinstance(agreement, Disagreement):
        return _disagreement(agreement, places, fix)
    exactly = "bit for bit" if agreement.bit_exact else "within tolerance"
    evidence = [*agreement.warnings, *agreement.notes]
    if agreement.adversaries:
        evidence.append(f"the inputs were fresh ones, and: {', '.join(agreement.adversaries)}")
    if not agreement.eager_repeatable:
        evidence.append("eager itself did not give the same bits twice")
    if agreement.not_compared:
        evidence.append(f"not compared: {', '.join(agreement.not_compared)}")
    return Judgement(
        gate="check",
        verdict=Verdict.PASSED,
        reason=f"replay equals eager {exactly} in {plural(agreement.replays, 'replay')}: "
        f"{plural(agreement.leaves, 'output tensor')}, {plural(agreement.state_tensors, 'state tensor')}",
        evidence=tuple(evidence),
    )


def _disagreement(disagreement: Disagreement, places: tuple[str, ...], fix: str) -> Judgement:
    cause = (f"hazard {disagreement.finding_id}",) if disagreement.finding_id else ()
    return Judgement(
        gate="check",
        verdict=Verdict.WRONG,
        reason=f"replay differs from eager in {disagreement.where}: {disagreement.message}",
        evidence=(*disagreement.evidence, *places, *cause),
        remedy=fix,
        hazard=disagreement.finding_id or "",
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


def judge_structure(batch: MeasuredBatch, max_new_kernels: int | None) -> Judgement:
    """Failed with more than ``max_new_kernels`` kernels over the baseline. With None the count is only shown.

    Counts of different kinds of device (operations on the twin, kernel nodes on CUDA) are not compared.
    """
    receipt, saved = batch.receipt, batch.saved
    allowed = None if batch.replaces_saved else max_new_kernels
    if receipt is None or receipt.kernels is None:
        reason = receipt.not_counted if receipt else ""
        return _uncounted(reason or "this backend does not count kernels", allowed)
    count = plural(receipt.kernels, "kernel")
    if batch.counted is not None:
        saved = batch.counted
    if isinstance(saved, NoBaseline):
        # A first run has nothing to compare with. It must be able to pass.
        asked = allowed if saved.comparison == "not-comparable" else None
        return _uncounted(f"{count}, not compared: {saved.reason}", asked)
    if saved.kernels is None:
        return _uncounted(f"{count}; the baseline holds no count", allowed)
    if batch.device is not None and batch.device.kind != saved.device.kind:
        return _uncounted(f"{count}, not compared: the baseline is of {saved.device.kind}", allowed)
    before, now = saved.device, batch.device
    evidence = () if now is None else software_changes(before, now)
    if now is not None and before.name != now.name:
        evidence = (f"the baseline's were counted on {before.name}", *evidence)
    return _compared(receipt, saved.kernels, saved.kernel_names, allowed, evidence)


def _compared(
    receipt: Receipt, before: int, names_before: Mapping[str, int], max_new: int | None, evidence: tuple[str, ...]
) -> Judgement:
    after = receipt.kernels or 0
    changes = changes_text(names_before, receipt.kernel_names)
    same = before == after
    reason = f"{plural(after, 'kernel')}, as in the baseline" if same else f"{before} -> {plural(after, 'kernel')}"
    if changes:
        reason += f"{', but not the same' if same else ''}: {changes}"
    if not changes and same:
        evidence = ()
    if max_new is None or after - before <= max_new:
        return Judgement(gate="structure", verdict=Verdict.PASSED, reason=reason, evidence=evidence)
    allowed = "no new one" if max_new == 0 else f"{max_new} new"
    return Judgement(
        gate="structure",
        verdict=Verdict.FAILED,
        reason=f"{reason}; this test allows {allowed}",
        evidence=evidence,
        accept=after - before,
    )


def _uncounted(reason: str, max_new_kernels: int | None) -> Judgement:
    """Without a comparison nothing fails. If the test sets a limit, it is not judged."""
    verdict = Verdict.PASSED if max_new_kernels is None else Verdict.NOT_JUDGED
    return Judgement(gate="structure", verdict=verdict, reason=reason)
