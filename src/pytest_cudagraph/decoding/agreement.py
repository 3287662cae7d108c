"""Compare the tokens of captured steps with an eager generation, and judge steps and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from pytest_cudagraph.check.compare import Tolerance
from pytest_cudagraph.decoding.engine import Generated
from pytest_cudagraph.decoding.logits import LogitsDifference, logits_difference, not_finite_logits, wide
from pytest_cudagraph.decoding.results import (
    GenerationReceipt,
    NotFiniteLogits,
    TokenAgreement,
    TokenDifference,
)
from pytest_cudagraph.units import plural
from pytest_cudagraph.values import Finding, Judgement, Verdict


class TokenComparison(NamedTuple):
    """How a generation by graphs compares with eager, and how its steps ran."""

    tokens: TokenAgreement | TokenDifference | NotFiniteLogits
    receipt: GenerationReceipt


class Generates(Protocol):
    """Generates by graphs and eagerly, as :class:`~pytest_cudagraph.decoding.engine.DecodeEngine` does."""

    def rows_of_graph(self, rows: int) -> int: ...

    def overwrite_cache(self, prompts: torch.Tensor, count: int) -> None: ...

    def generate(
        self,
        prompts: torch.Tensor,
        count: int,
        *,
        graphs: bool = True,
        forced: torch.Tensor | None = None,
        keep_logits: bool = False,
    ) -> Generated: ...


def compare_with_eager(engine: Generates, prompts: torch.Tensor, count: int, tolerance: Tolerance) -> TokenComparison:
    """Generate ``count`` tokens eagerly and by graphs. In between the cache gets another request.

    In the same shapes both run freely, and every token and every bit of its logits must be equal. A padded batch
    computes other shapes, which round differently. Then each step of both gets eager's tokens
    (:func:`compare_logits`).
    """
    eager = engine.generate(prompts, count, graphs=False, keep_logits=True)
    engine.overwrite_cache(prompts, count)
    if engine.rows_of_graph(prompts.shape[0]) != prompts.shape[0]:
        found = engine.generate(prompts, count, forced=eager.tokens, keep_logits=True)
        return TokenComparison(compare_logits(eager, found, tolerance), found.receipt)
    found = engine.generate(prompts, count, keep_logits=True)
    if not_finite := not_finite_logits(eager.logits):
        return TokenComparison(not_finite, found.receipt)
    assert eager.logits is not None
    assert found.logits is not None
    differ = (eager.tokens != found.tokens) | (eager.logits != found.logits).any(-1)
    if bool(differ.any()):
        return TokenComparison(_difference(eager, found, differ, None), found.receipt)
    return TokenComparison(TokenAgreement(compared=eager.tokens.numel(), same_shapes=True), found.receipt)


def compare_logits(
    eager: Generated, found: Generated, tolerance: Tolerance
) -> TokenAgreement | TokenDifference | NotFiniteLogits:
    """Compare two generations whose steps got the same tokens, by :func:`~pytest_cudagraph.decoding.logits_difference`.

    A token may differ only where eager's two largest logits are at most twice the tolerance apart. Such a token is a
    tie. Not a number is a difference.
    """
    assert eager.logits is not None
    assert found.logits is not None
    if not_finite := not_finite_logits(eager.logits):
        return not_finite
    difference = logits_difference(eager.logits, found.logits, tolerance)
    # A choice that is none of the logits' largest would be no tie.
    expected = wide(eager.logits)
    behind = _logits_of(expected, eager.tokens) - _logits_of(expected, found.tokens)
    beyond = difference.beyond | (behind > 2 * difference.allowed)
    if bool(beyond.any()):
        return _difference(eager, found, beyond, difference)
    return TokenAgreement(
        compared=eager.tokens.numel(),
        same_shapes=False,
        ties=int((eager.tokens != found.tokens).sum()),
        largest_difference=difference.largest,
        tolerance=difference.tolerance,
    )


def _logits_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.gather(-1, tokens[..., None])[..., 0]


def _difference(
    eager: Generated, found: Generated, places: torch.Tensor, difference: LogitsDifference | None
) -> TokenDifference:
    """The first of ``places`` (rows, count) in time, which is where the cause is."""
    assert eager.logits is not None
    position, row = (int(index) for index in places.T.nonzero()[0])
    two = eager.logits[row, position].topk(2).values
    return TokenDifference(
        row=row,
        position=position,
        expected=int(eager.tokens[row, position]),
        found=int(found.tokens[row, position]),
        differing=int((eager.tokens != found.tokens).sum()),
        compared=eager.tokens.numel(),
        gap=float(two[0] - two[1]),
        same_shapes=difference is None,
        largest_difference=difference.largest if difference else None,
        tolerance=difference.tolerance if difference else None,
    )


_FIX = (
    "fix: keep the position in a tensor on the device and change it in place: a replay repeats the addresses and "
    "numbers of the capture"
)
_FIX_LOGITS = (
    "fix: look for code that runs only under capture or only without, and for Python values that the capture has frozen"
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
    found: TokenAgreement | TokenDifference | NotFiniteLogits,
    *,
    exact: bool,
    findings: Sequence[Finding] = (),
    other_shapes: str = _FIX_OTHER_SHAPES,
) -> Judgement:
    """Wrong if a token differs from eager's. ``exact`` forbids ties too. ``findings`` are the likely cause.

    ``other_shapes`` is the remedy where the two computed other shapes.

    Without finite logits of eager there is nothing to compare: then it is the gate ``finite`` that is missed.
    """
    if isinstance(found, NotFiniteLogits):
        return judge_finite(f"row {found.row}, token {found.position}", found.text)
    if isinstance(found, TokenDifference):
        return _different(found, findings, other_shapes)
    how = "in the same shapes" if found.same_shapes else "teacher-forced"
    ties = f", {plural(found.ties, 'tie')}" if found.ties else ""
    evidence = () if found.same_shapes else (_logits_text(found),)
    if found.ties and exact:
        reason = f"every token must be eager's (exact=True); {found.ties} of {found.compared} differ, all of them ties"
        return Judgement(gate="tokens", verdict=Verdict.WRONG, reason=reason, evidence=evidence)
    reason = f"{plural(found.compared, 'token')} equal to eager's, {how}{ties}"
    return Judgement(gate="tokens", verdict=Verdict.PASSED, reason=reason, evidence=evidence)


def judge_finite(place: str, text: str) -> Judgement:
    """Wrong: at ``place`` the eager reference has the logits of ``text``."""
    return Judgement(
        gate="finite",
        verdict=Verdict.WRONG,
        reason=f"eager's logits must be finite (-inf rules a token out); {place} has {text}",
        evidence=("no graph is involved: the decoder gives these logits without one",),
        remedy="fix: look at the weights, their dtype, and rows of the mask that allow nothing",
    )


def _different(found: TokenDifference, findings: Sequence[Finding], other_shapes: str) -> Judgement:
    what = f"{found.differing} of {found.compared} tokens" if found.differing else "logits"
    first = f"first in row {found.row}, token {found.position}"
    tokens = f": eager gives {found.expected}, the graph {found.found}" if found.expected != found.found else ""
    gap = f"eager's two largest logits are {found.gap:.3g} apart there"
    evidence = [gap, "both generations used the same shapes" if found.same_shapes else _logits_text(found)]
    evidence += [f"{each.site}: {each.message} [{each.id}]" for each in findings if each.site]
    same_shapes = f"fix: {findings[0].fix}" if findings else _FIX if found.differing else _FIX_LOGITS
    return Judgement(
        gate="tokens",
        verdict=Verdict.WRONG,
        reason=f"{what} differ from eager's, {first}{tokens}",
        evidence=tuple(evidence),
        remedy=same_shapes if found.same_shapes else other_shapes,
        hazard=findings[0].id if findings else "",
    )


def _logits_text(found: TokenAgreement | TokenDifference) -> str:
    return f"logits differ by at most {found.largest_difference:.3g}, allowed there are {found.tolerance:.3g}"
