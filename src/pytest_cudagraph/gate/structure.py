"""The structure gate: the number of kernels in the graph. It is exact, and on the twin equal on every CPU."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_cudagraph.gate.wording import changes_text, software_changes
from pytest_cudagraph.units import plural
from pytest_cudagraph.values import DeviceInfo, Judgement, MeasuredBatch, NoBaseline, Receipt, Verdict


def judge_structure(batch: MeasuredBatch, max_new_kernels: int | None) -> Judgement:
    """Failed with more than ``max_new_kernels`` kernels over the baseline. With None the count is only shown.

    Counts of different kinds of device (operations on the twin, kernel nodes on CUDA) are not compared.
    """
    receipt, saved = batch.receipt, batch.saved
    allowed = None if batch.replaces_saved else max_new_kernels
    if receipt is None or receipt.kernels is None:
        reason = receipt.not_counted if receipt else ""
        return _uncounted(reason or "this backend does not count kernels", allowed)
    found = plural(receipt.kernels, "kernel")
    if batch.counted is not None:
        saved = batch.counted
    if isinstance(saved, NoBaseline):
        # A first run has nothing to compare with. It must be able to pass.
        asked = allowed if saved.comparison == "not-comparable" else None
        return _uncounted(f"{found}, not compared: {saved.reason}", asked)
    if saved.kernels is None:
        return _uncounted(f"{found}; the baseline holds no count", allowed)
    if batch.device is not None and batch.device.kind != saved.device.kind:
        return _uncounted(f"{found}, not compared: the baseline is of {saved.device.kind}", allowed)
    evidence = () if batch.device is None else _other_machine(saved.device, batch.device)
    return _compared(receipt, saved.kernels, saved.kernel_names, allowed, evidence)


def _other_machine(before: DeviceInfo, now: DeviceInfo) -> tuple[str, ...]:
    elsewhere = (f"the baseline's were counted on {before.name}",) if before.name != now.name else ()
    return (*elsewhere, *software_changes(before, now))


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
