"""The gates of a generation: every step a replay, every token eager's."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_cudagraph.units import plural
from pytest_cudagraph.values import Finding, GenerationReceipt, Judgement, TokenAgreement, TokenDifference, Verdict

_FIX = (
    "fix: keep the position in a tensor on the device and change it in place: a replay repeats the addresses and "
    "numbers of the capture"
)
_FIX_OTHER_SHAPES = "fix: a row must not depend on the other rows; where the difference is rounding: rtol, atol"


def judge_steps(receipt: GenerationReceipt) -> Judgement:
    """Passed if every decode step replayed a graph, and nothing else did."""
    padded = f", each with {plural(receipt.padded_rows, 'padded row')}" if receipt.padded_rows else ""
    if receipt.replays == receipt.steps and not receipt.eager:
        reason = f"{plural(receipt.steps, 'decode step')}, all replays of a graph{padded}"
        return Judgement(gate="steps", verdict=Verdict.PASSED, reason=reason)
    reasons = tuple(f"{plural(count, 'step')}: {reason}" for reason, count in receipt.eager.items())
    return Judgement(
        gate="steps",
        verdict=Verdict.NOT_CAPTURED,
        reason=f"every decode step must replay a graph; {plural(receipt.replays, 'replay')} "
        f"in {plural(receipt.steps, 'step')}",
        evidence=reasons,
        remedy="fix: give decode_engine a graph for this batch size (graph_sizes=)",
    )


def judge_tokens(
    found: TokenAgreement | TokenDifference, *, exact: bool, findings: Sequence[Finding] = ()
) -> Judgement:
    """Wrong if a token differs from eager's. ``exact`` forbids ties too. ``findings`` are the likely cause."""
    if isinstance(found, TokenDifference):
        return _different(found, findings)
    how = "in the same shapes" if found.same_shapes else "teacher-forced"
    ties = f", {plural(found.ties, 'tie')}" if found.ties else ""
    evidence = () if found.same_shapes else (_logits_text(found),)
    if found.ties and exact:
        reason = f"every token must be eager's (exact=True); {found.ties} of {found.compared} differ, all of them ties"
        return Judgement(gate="tokens", verdict=Verdict.WRONG, reason=reason, evidence=evidence)
    reason = f"{plural(found.compared, 'token')} equal to eager's, {how}{ties}"
    return Judgement(gate="tokens", verdict=Verdict.PASSED, reason=reason, evidence=evidence)


def _different(found: TokenDifference, findings: Sequence[Finding]) -> Judgement:
    what = f"{found.differing} of {found.compared} tokens" if found.differing else "logits"
    first = f"first in row {found.row}, token {found.position}"
    tokens = f": eager gives {found.expected}, the graph {found.found}" if found.expected != found.found else ""
    gap = f"eager's two largest logits are {found.gap:.3g} apart there"
    evidence = [gap, "both generations used the same shapes" if found.same_shapes else _logits_text(found)]
    evidence += [f"{each.site}: {each.message} [{each.id}]" for each in findings if each.site]
    own = f"fix: {findings[0].fix}" if findings else _FIX
    return Judgement(
        gate="tokens",
        verdict=Verdict.WRONG,
        reason=f"{what} differ from eager's, {first}{tokens}",
        evidence=tuple(evidence),
        remedy=own if found.same_shapes else _FIX_OTHER_SHAPES,
        hazard=findings[0].id if findings else "",
    )


def _logits_text(found: TokenAgreement | TokenDifference) -> str:
    return f"logits differ by at most {found.largest_difference:.3g}, allowed there are {found.tolerance:.3g}"
