"""The gates of a generation: every step a replay, every token eager's."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pytest_cudagraph.decoding.results import (
    GenerationReceipt,
    Lookup,
    Prefill,
    PrefillBytes,
    TokenAgreement,
    TokenDifference,
)
from pytest_cudagraph.units import bytes_text, plural
from pytest_cudagraph.values import Finding, Judgement, Verdict

_FIX = (
    "fix: keep the position in a tensor on the device and change it in place: a replay repeats the addresses and "
    "numbers of the capture"
)
_FIX_OTHER_SHAPES = "fix: a row must not depend on the other rows; where the difference is rounding: rtol, atol"


def judge_steps(receipt: GenerationReceipt, *, step: str = "decode step") -> Judgement:
    """Passed if every ``step`` replayed a graph, and nothing else did."""
    padded = f", each with {plural(receipt.padded_rows, 'padded row')}" if receipt.padded_rows else ""
    if receipt.replays == receipt.steps and not receipt.eager:
        reason = f"{plural(receipt.steps, step)}, all replays of a graph{padded}"
        return Judgement(gate="steps", verdict=Verdict.PASSED, reason=reason)
    noun = step.split()[-1]
    reasons = tuple(f"{plural(count, noun)}: {reason}" for reason, count in receipt.eager.items())
    return Judgement(
        gate="steps",
        verdict=Verdict.NOT_CAPTURED,
        reason=f"every {step} must replay a graph; {plural(receipt.replays, 'replay')} "
        f"in {plural(receipt.steps, noun)}",
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


def judge_chunks(found: Prefill) -> Judgement | None:
    """Wrong if a prefill in chunks gives other logits or another cache than one call. None: ``meta`` has no values."""
    if found.largest_difference is None or found.tolerance is None:
        return None
    chunks = f"chunks of {found.chunk} tokens"
    differ = f"logits and cache differ by at most {found.largest_difference:.3g}"
    if found.largest_difference <= found.tolerance:
        return Judgement(gate="tokens", verdict=Verdict.PASSED, reason=f"{chunks} give what one call gives: {differ}")
    return Judgement(
        gate="tokens",
        verdict=Verdict.WRONG,
        reason=f"{chunks} must give the logits and the cache of one call; they differ by "
        f"{found.largest_difference:.3g}, allowed are {found.tolerance:.3g}",
        remedy="fix: a call attends to what the cache holds before it; where the difference is rounding: rtol, atol",
    )


_ROUNDING = 100
"""A suggested limit has two decimals."""


def judge_bytes(found: Prefill, max_ratio: float | None) -> Judgement:
    """Failed if the chunked prefill takes more than ``max_ratio`` of the bytes of one call. None: only shown."""
    chunked, whole = (each.total(found.counting) for each in (found.chunked, found.whole))
    counted = f"{found.counting}: {bytes_text(chunked)} of {bytes_text(whole)}"
    reason = f"chunks of {found.chunk} take {found.bytes_ratio:.3f} of the bytes of one call ({counted})"
    parts = tuple(_bytes_line(*each) for each in (("one call", found.whole), ("chunks", found.chunked)))
    if max_ratio is None or found.bytes_ratio <= max_ratio:
        return Judgement(gate="bytes", verdict=Verdict.PASSED, reason=reason, evidence=parts)
    accept = math.ceil(found.bytes_ratio * _ROUNDING) / _ROUNDING
    return Judgement(
        gate="bytes",
        verdict=Verdict.FAILED,
        reason=f"{reason}; this test allows {max_ratio:g}",
        evidence=parts,
        remedy=f"to accept: max_bytes_ratio={accept:.2f}",
    )


def _bytes_line(what: str, found: PrefillBytes) -> str:
    activations, cache = bytes_text(found.activations_bytes), bytes_text(found.cache_bytes)
    return f"{what}: activations {activations}, cache {cache}, weights {bytes_text(found.weights_bytes)}"


def judge_lookup(found: Lookup, min_tokens_per_step: float | None) -> Judgement:
    """Failed with fewer tokens per step than asked for. None: only shown."""
    steps, tokens = plural(found.receipt.steps, "call"), plural(found.output_length - 1, "token")
    reason = f"{found.tokens_per_step:.2f} tokens per step ({tokens} of each row in {steps})"
    evidence = (
        f"{found.accepted} of {found.drafted} proposed tokens accepted ({found.acceptance_ratio:.0%}), "
        f"mean acceptance length {found.mean_acceptance_length:.2f}, {plural(found.verified, 'verified call')}",
    )
    if min_tokens_per_step is None or found.tokens_per_step >= min_tokens_per_step:
        return Judgement(gate="lookup", verdict=Verdict.PASSED, reason=reason, evidence=evidence)
    accept = math.floor(found.tokens_per_step * _ROUNDING) / _ROUNDING
    return Judgement(
        gate="lookup",
        verdict=Verdict.FAILED,
        reason=f"{reason}; this test asks for {min_tokens_per_step:g}",
        evidence=evidence,
        remedy=f"to accept: min_tokens_per_step={accept:.2f}",
    )
