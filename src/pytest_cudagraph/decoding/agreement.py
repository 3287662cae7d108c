"""Compare the tokens of captured steps with an eager generation, and judge steps and tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from pytest_cudagraph.check.compare import Tolerance
from pytest_cudagraph.decoding.engine import Generated
from pytest_cudagraph.decoding.results import (
    GenerationReceipt,
    NotFiniteLogits,
    TokenAgreement,
    TokenDifference,
)
from pytest_cudagraph.units import plural
from pytest_cudagraph.values import Finding, Judgement, Verdict

_BFLOAT16_RTOL = 0.016
"""That of ``torch.testing.assert_close``."""


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

    In the same shapes both run freely, and every token must be equal. A padded batch computes other shapes, which
    round differently. Then each step of both gets eager's tokens (:func:`compare_logits`).
    """
    eager = engine.generate(prompts, count, graphs=False, keep_logits=True)
    engine.overwrite_cache(prompts, count)
    if engine.rows_of_graph(prompts.shape[0]) != prompts.shape[0]:
        found = engine.generate(prompts, count, forced=eager.tokens, keep_logits=True)
        return TokenComparison(compare_logits(eager, found, tolerance), found.receipt)
    found = engine.generate(prompts, count)
    if not_finite := not_finite_logits(eager.logits):
        return TokenComparison(not_finite, found.receipt)
    if torch.equal(eager.tokens, found.tokens):
        return TokenComparison(TokenAgreement(compared=eager.tokens.numel(), same_shapes=True), found.receipt)
    return TokenComparison(_difference(eager, found, eager.tokens != found.tokens, None), found.receipt)


class _Largest(NamedTuple):
    """The difference of logits that exceeds its tolerance by most, or comes closest to it."""

    difference: float
    tolerance: float


def not_finite_logits(logits: torch.Tensor | None) -> NotFiniteLogits | None:
    """The first place in time of logits (rows, count, vocabulary) that is no choice. -inf rules a token out."""
    assert logits is not None
    largest = logits.amax(-1)
    places = (~largest.isfinite()).T.nonzero()
    if not len(places):
        return None
    position, row = (int(index) for index in places[0])
    return NotFiniteLogits(row=row, position=position, largest=float(largest[row, position]))


def compare_logits(
    eager: Generated, found: Generated, tolerance: Tolerance
) -> TokenAgreement | TokenDifference | NotFiniteLogits:
    """Compare two generations whose steps got the same tokens.

    At each place the logits may differ by ``atol + rtol * size`` of :func:`_tolerance_of_model` and :func:`_sizes`: a
    small logit is a sum of terms as large as those of a large one. So a token may differ only where eager's two largest
    logits are at most twice that apart. Such a token is a tie. Not a number is a difference.
    """
    assert eager.logits is not None
    assert found.logits is not None
    if not_finite := not_finite_logits(eager.logits):
        return not_finite
    expected, (rtol, atol) = _wide(eager.logits), _tolerance_of_model(eager.logits.dtype, tolerance)
    differences = absolute_differences(expected, _wide(found.logits)).amax(-1)
    allowed = atol + rtol * _sizes(expected)
    worst = int((differences - allowed).nan_to_num(nan=torch.inf).argmax())
    largest = _Largest(float(differences.flatten()[worst]), float(allowed.flatten()[worst]))
    # A choice that is none of the logits' largest would be no tie.
    behind = _logits_of(expected, eager.tokens) - _logits_of(expected, found.tokens)
    beyond = ~(differences <= allowed) | (behind > 2 * allowed)
    if bool(beyond.any()):
        return _difference(eager, found, beyond, largest)
    return TokenAgreement(
        compared=eager.tokens.numel(),
        same_shapes=False,
        ties=int((eager.tokens != found.tokens).sum()),
        largest_difference=largest.difference,
        tolerance=largest.tolerance,
    )


def _tolerance_of_model(dtype: torch.dtype, tolerance: Tolerance) -> tuple[float, float]:
    """``(rtol, atol)`` for the logits of a whole model in other shapes.

    The defaults of ``assert_close`` are for one operation, and each layer adds its own rounding. So the relative part
    is at least half of the dtype's digits, ``sqrt(eps)``, and at most that of bfloat16, which has few digits.
    """
    rtol, atol = tolerance.of(dtype)
    if tolerance.rtol is None:
        rtol = max(rtol, min(math.sqrt(torch.finfo(dtype).eps), _BFLOAT16_RTOL))
    return rtol, atol


def absolute_differences(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Element by element. An infinity does not differ from itself: models rule tokens out by it."""
    return torch.where(expected == found, 0.0, (found - expected).abs())


def _sizes(logits: torch.Tensor) -> torch.Tensor:
    """The size of the logits of each place: the largest or the median, whichever is farther from 0.

    Not the smallest: a logit of ``finfo.min`` or -1e9 rules a token out, and would allow every difference.
    """
    largest, median = logits.amax(-1).abs(), logits.median(-1).values.abs()
    return torch.maximum(*(each.masked_fill(each.isinf(), 0.0) for each in (largest, median)))


def _logits_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.gather(-1, tokens[..., None])[..., 0]


def _difference(eager: Generated, found: Generated, places: torch.Tensor, largest: _Largest | None) -> TokenDifference:
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
        same_shapes=largest is None,
        largest_difference=largest.difference if largest else None,
        tolerance=largest.tolerance if largest else None,
    )


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


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
    found: TokenAgreement | TokenDifference | NotFiniteLogits, *, exact: bool, findings: Sequence[Finding] = ()
) -> Judgement:
    """Wrong if a token differs from eager's. ``exact`` forbids ties too. ``findings`` are the likely cause.

    Without finite logits of eager there is nothing to compare: then it is the gate ``finite`` that is missed.
    """
    if isinstance(found, NotFiniteLogits):
        return judge_finite(f"row {found.row}, token {found.position}", found.text)
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


def judge_finite(place: str, text: str) -> Judgement:
    """Wrong: at ``place`` the eager reference has the logits of ``text``."""
    return Judgement(
        gate="finite",
        verdict=Verdict.WRONG,
        reason=f"eager's logits must be finite (-inf rules a token out); {place} has {text}",
        evidence=("no graph is involved: the decoder gives these logits without one",),
        remedy="fix: look at the weights, their dtype, and rows of the mask that allow nothing",
    )


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
