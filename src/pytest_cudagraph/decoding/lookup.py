"""Prompt lookup: tokens proposed from the text so far, verified together in one captured call."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from pytest_cudagraph.decoding.agreement import compare_logits, judge_steps, judge_tokens
from pytest_cudagraph.decoding.engine import DecodeEngine, Generated
from pytest_cudagraph.decoding.prompts import GenerationSettings
from pytest_cudagraph.decoding.results import GenerationReceipt, Lookup, TokenAgreement
from pytest_cudagraph.errors import InputError
from pytest_cudagraph.foreign import value_text
from pytest_cudagraph.pipeline.device_context import DeviceContext
from pytest_cudagraph.units import plural
from pytest_cudagraph.values import BatchReport, Judgement, Verdict

_FIX = (
    "fix: rewind(count) must forget the last count tokens, for each count up to k, and a call of k + 1 tokens must "
    "give the logits of k + 1 calls; where the difference is rounding: rtol, atol"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupRequest:
    """``k`` tokens per proposal, after the last earlier occurrence of the longest suffix of ``ngram`` tokens.

    Raises :class:`~pytest_cudagraph.errors.InputError`.
    """

    k: int
    ngram: tuple[int, int]
    """The shortest and the longest suffix that is looked up."""
    min_tokens_per_step: float | None

    def __post_init__(self) -> None:
        if not _is_count(self.k):
            raise InputError(f"k is a number of proposed tokens of at least 1; found {value_text(self.k)}")
        two = self.ngram if isinstance(self.ngram, tuple | list) and len(self.ngram) == 2 else (0, 0)
        if not all(map(_is_count, two)) or two[0] > two[1]:
            raise InputError(
                f"ngram is the shortest and the longest suffix, such as (2, 4); found {value_text(self.ngram)}"
            )
        least = self.min_tokens_per_step
        if least is not None and (isinstance(least, bool) or not isinstance(least, int | float) or least < 1):
            raise InputError(f"min_tokens_per_step is a number of at least 1; found {value_text(least)}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def propose(tokens: Sequence[int], request: LookupRequest) -> list[int]:
    """At most ``k`` tokens that followed the last earlier occurrence of the longest known suffix. Empty without one."""
    shortest, longest = request.ngram
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        suffix = list(tokens[-length:])
        for start in range(len(tokens) - length - 1, -1, -1):
            if list(tokens[start : start + length]) == suffix:
                return list(tokens[start + length : start + length + request.k])
    return []


class _Call(NamedTuple):
    """One call: the tokens proposed to it, over all rows, and how many were right in every row."""

    drafted: int
    accepted: int
    logits: torch.Tensor
    """(rows, accepted + 1, vocabulary)."""


@dataclass(slots=True, kw_only=True)
class LookupRun:
    """One generation with prompt lookup. Each step takes the tokens of the eager reference (teacher-forced).

    So every logit is comparable with eager's, and a token counts as accepted if it is eager's. All rows move on
    together, by the accepted tokens of the row that has the fewest, because a decoder rewinds all rows alike.
    """

    engine: DecodeEngine
    request: LookupRequest
    prompts: torch.Tensor
    expected: torch.Tensor
    """Eager's tokens, (rows, count)."""
    rows: int
    """Those that count. The others are padding."""
    calls: list[_Call] = field(default_factory=list)

    def run(self) -> Generated:
        """Generate. The receipt counts calls: verifications, and decode steps where there is nothing to verify."""
        count, before = self.expected.shape[1], self.engine.replays
        first = self.engine.prefill(self.prompts)
        logits = [first.logits[:, -1:].clone()]
        self.calls += self._calls(count)
        logits += [call.logits for call in self.calls]
        found = torch.cat(logits, 1)[:, :count]
        steps, replays = len(self.calls), self.engine.replays - before
        eager = {"its graph was not replayed": steps - replays} if replays < steps else {}
        receipt = GenerationReceipt(steps=steps, replays=replays, eager=eager)
        return Generated(tokens=found.argmax(-1), logits=found, receipt=receipt)

    def _calls(self, count: int) -> Iterator[_Call]:
        texts = [[*prompt, *text] for prompt, text in zip(self.prompts.tolist(), self.expected.tolist(), strict=True)]
        at, length = self.prompts.shape[1], self.engine.decoder.length
        end = at + count - 1
        while at < end:
            drafts = [propose(text[: at + 1], self.request) for text in texts]
            if not any(drafts) or at + self.request.k + 1 > length:
                drafts = [[] for _ in texts]
            call = self._call([text[at:] for text in texts], drafts)
            at += call.accepted + 1
            yield call

    def _call(self, ahead: Sequence[Sequence[int]], drafts: Sequence[Sequence[int]]) -> _Call:
        """``ahead`` begins with the last token of each row. What follows in it decides what is accepted."""
        k = self.request.k if any(drafts) else 0
        fed = [[text[0], *draft, *[0] * (k - len(draft))] for text, draft in zip(ahead, drafts, strict=True)]
        step = self.engine.step(torch.tensor(fed, device=self.engine.device))
        if step.logits.shape[1] != k + 1:
            raise InputError(
                f"prompt lookup needs the logits of all {k + 1} tokens of a call; the decoder gives "
                f"{step.logits.shape[1]}: static_decoder(..., logits_to_keep={k + 1})"
            )
        accepted = min(_agreeing(text[1:], draft) for text, draft in zip(ahead, drafts, strict=True))
        if accepted < k:
            self.engine.decoder.rewind(k - accepted)
        drafted = sum(len(draft) for draft in drafts[: self.rows])
        return _Call(drafted, accepted, step.logits[:, : accepted + 1].clone())


def _agreeing(truth: Sequence[int], draft: Sequence[int]) -> int:
    """How many tokens of a draft are right before the first wrong one."""
    for index, token in enumerate(draft):
        if index >= len(truth) or truth[index] != token:
            return index
    return len(draft)


def run_lookup(
    engine: DecodeEngine,
    prompts: torch.Tensor,
    request: LookupRequest,
    settings: GenerationSettings,
    device_context: DeviceContext,
) -> BatchReport:
    """Generate with prompt lookup, compare with greedy generation, and judge the tokens per step."""
    rows, count = prompts.shape[0], settings.output_length
    engine.check_prompts(prompts, count)
    if request.k + 1 > engine.decoder.length:
        raise InputError(
            f"k = {request.k} needs calls of {request.k + 1} tokens; the decoder holds {engine.decoder.length}"
        )
    size = engine.rows_of_graph(rows)
    if not engine.has_graph(size, request.k + 1):
        engine.capture(size, request.k + 1)
    eager = engine.generate(prompts, count, graphs=False, keep_logits=True)
    engine.overwrite_cache(prompts, count)
    run = LookupRun(
        engine=engine,
        request=request,
        prompts=engine.padded(prompts, size),
        expected=engine.padded(eager.tokens, size),
        rows=rows,
    )
    with device_context.backend.running():
        found = run.run()
    tokens = compare_logits(eager, found.of_rows(rows), settings.tolerance)
    lookup = _lookup_of(run, found.receipt, tokens if isinstance(tokens, TokenAgreement) else None)
    judgements = (
        judge_steps(found.receipt),
        judge_tokens(tokens, exact=settings.exact, other_shapes=_FIX),
        judge_lookup(lookup, request.min_tokens_per_step),
    )
    return BatchReport(batch_size=rows, judgements=judgements, scenario=lookup)


def _lookup_of(run: LookupRun, receipt: GenerationReceipt, tokens: TokenAgreement | None) -> Lookup:
    """What a finished run counted, of its real rows."""
    return Lookup(
        batch_size=run.rows,
        prompt_length=run.prompts.shape[1],
        output_length=run.expected.shape[1],
        k=run.request.k,
        receipt=receipt,
        tokens=tokens,
        verified=sum(call.drafted > 0 for call in run.calls),
        drafted=sum(call.drafted for call in run.calls),
        accepted=run.rows * sum(call.accepted for call in run.calls),
    )


_ROUNDING = 100
"""A suggested limit has two decimals."""


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
