"""Guided generation of one batch, gated: steps, masks, tokens and outputs exactly, then time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from pytest_cudagraph.decoding.agreement import compare_with_eager, judge_steps, judge_tokens
from pytest_cudagraph.decoding.guided import Choose, GuidedEngine, outputs_of, time_guided
from pytest_cudagraph.decoding.guided_results import DisallowedToken, Guided, GuidedTimes
from pytest_cudagraph.decoding.prompts import GenerationSettings
from pytest_cudagraph.decoding.results import TokenAgreement
from pytest_cudagraph.decoding.token_masks import first_disallowed
from pytest_cudagraph.errors import InputError
from pytest_cudagraph.foreign import value_text
from pytest_cudagraph.gate.wording import change_text
from pytest_cudagraph.pipeline.device_context import DeviceContext
from pytest_cudagraph.units import latency_text, percent_text
from pytest_cudagraph.values import BatchReport, Interval, Judgement, Timing, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedRequest:
    """What a guided generation must keep. Raises :class:`~pytest_cudagraph.errors.InputError`."""

    min_valid: float
    """Of the completed outputs, the share that is valid."""
    max_overhead: float | None
    """Of a guided step over a greedy one. None: only shown."""
    choose: Choose | None
    """The choice under the mask. None: :func:`choose_allowed`."""

    def __post_init__(self) -> None:
        if not _is_number(self.min_valid) or not 0 <= self.min_valid <= 1:
            raise InputError(f"min_valid is a share of 0 to 1; found {value_text(self.min_valid)}")
        if self.max_overhead is not None and not (_is_number(self.max_overhead) and 0 < self.max_overhead < math.inf):
            raise InputError(f"max_overhead is a number above 0; found {value_text(self.max_overhead)}")
        if self.choose is not None and not callable(self.choose):
            raise InputError(f"choose is a function of logits and masks; found {value_text(self.choose)}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedRun:
    """Guided generation of one batch, gated. The settings have one output length."""

    guided: GuidedEngine
    request: GuidedRequest
    settings: GenerationSettings
    device_context: DeviceContext

    def batch(self, prompts: torch.Tensor) -> BatchReport:
        """Judge steps, masks, tokens, outputs, time, in this order. The first missed gate ends it."""
        grammar, count = self.guided.grammar, self.settings.output_length
        found = self.guided.generate(prompts, count)
        tokens = found.tokens.tolist()
        facts = Guided(
            batch_size=prompts.shape[0],
            prompt_length=prompts.shape[1],
            output_length=count,
            grammar=grammar.grammar.kind,
            vocabulary=grammar.vocabulary,
            receipt=found.receipt,
            choices=found.choices,
            outputs=outputs_of(grammar, tokens),
            is_parsed=grammar.grammar.parse is not None,
        )
        judgements = (
            judge_steps(found.receipt),
            judge_steps(found.choices, step="choice"),
            judge_mask(first_disallowed(grammar, tokens)),
        )
        report = BatchReport(batch_size=facts.batch_size, judgements=judgements, scenario=facts)
        return report if report.verdict.fails else self._compared(report, facts, prompts, found.steps)

    def _compared(self, report: BatchReport, facts: Guided, prompts: torch.Tensor, steps: int) -> BatchReport:
        tokens = compare_with_eager(self.guided, prompts, steps, self.settings.tolerance).tokens
        judgements = [*report.judgements, judge_tokens(tokens, exact=self.settings.exact)]
        if isinstance(tokens, TokenAgreement):
            facts = replace(facts, tokens=tokens)
        if not judgements[-1].verdict.fails:
            judgements.append(judge_outputs(facts, self.request.min_valid))
        report = replace(report, judgements=tuple(judgements), scenario=facts)
        return report if report.verdict.fails else self._measured(report, facts, prompts, steps)

    def _measured(self, report: BatchReport, facts: Guided, prompts: torch.Tensor, steps: int) -> BatchReport:
        limit, why = self.request.max_overhead, self.device_context.why_not_judged
        timing, times = time_guided(self.guided, prompts, steps, self.device_context, limit, self.settings)
        judged = () if limit is None else (judge_overhead(times, timing, limit, why),)
        return replace(report, judgements=(*report.judgements, *judged), scenario=replace(facts, times=times))


_FIX_LATE = "fix: copy the mask of this step into the static input before the choice is replayed"
_FIX_IGNORED = "fix: choose= must read its mask argument with torch operations: a graph repeats no other code"


def judge_mask(found: DisallowedToken | None) -> Judgement:
    """Wrong if a token was chosen that the mask of its own step does not allow."""
    if found is None:
        return Judgement(gate="mask", verdict=Verdict.PASSED, reason="each token is allowed by the mask of its step")
    cause = "the mask of the step before allows it" if found.in_previous_mask else "no mask until then allows it"
    return Judgement(
        gate="mask",
        verdict=Verdict.WRONG,
        reason="every token must be allowed by the mask of its step; "
        f"row {found.row}, token {found.position} is {found.token} ({found.shown}), which is not",
        evidence=(f"it follows {value_text(found.before)}", cause),
        remedy=_FIX_LATE if found.in_previous_mask else _FIX_IGNORED,
    )


_SHOWN = 3
"""Invalid outputs in a message."""

_STEP = 100
"""A suggested share has two decimals."""


def judge_outputs(found: Guided, min_valid: float) -> Judgement:
    """Failed if fewer of the completed outputs are valid than asked for. Cut outputs do not count.

    Not judged where only the matcher knows the grammar. Inconclusive where every output was cut.
    """
    cut = f", {found.cut} cut at {found.output_length} tokens" if found.cut else ""
    if not found.is_parsed:
        reason = f"validity is not judged: only the matcher knows this grammar{cut}"
        remedy = "to judge: ebnf(rules, parse=) with a function that raises for an invalid text"
        return Judgement(gate="validity", verdict=Verdict.NOT_JUDGED, reason=reason, remedy=remedy)
    if found.valid_ratio is None:
        reason = f"no output of {len(found.outputs)} was completed{cut}"
        remedy = "to judge: a larger output_length=, or a grammar with shorter outputs"
        return Judgement(gate="validity", verdict=Verdict.INCONCLUSIVE, reason=reason, remedy=remedy)
    reason = f"{found.valid} of {found.completed} completed outputs valid{cut}"
    wrong = [(row, each) for row, each in enumerate(found.outputs) if each.problem]
    evidence = tuple(f"row {row}: {each.problem}: {value_text(each.text)}" for row, each in wrong[:_SHOWN])
    if found.valid_ratio >= min_valid:
        return Judgement(gate="validity", verdict=Verdict.PASSED, reason=reason, evidence=evidence)
    accept = math.floor(found.valid_ratio * _STEP) / _STEP
    to_accept = f"; to accept: min_valid={accept:.2f}" if accept else ""
    return Judgement(
        gate="validity",
        verdict=Verdict.FAILED,
        reason=f"{reason}; this test asks for {min_valid:.0%}",
        evidence=evidence,
        remedy=f"fix: a grammar that allows valid outputs alone{to_accept}",
    )


def judge_overhead(times: GuidedTimes, timing: Timing, limit: float, why_not_judged: str) -> Judgement:
    """Passed or failed as the measurement decided whether a guided step exceeds a greedy one by more than ``limit``."""
    reason = f"a guided step takes {percent_text(times.overhead.estimate)} more than a greedy one"
    reason = f"{reason} ({_interval_text(times.overhead)})"
    evidence = (
        f"greedy -> guided: {change_text(times.greedy.median_ns, times.guided.median_ns)}",
        f"a row's mask takes {latency_text(times.mask_ns)} of the CPU, "
        f"those of all rows {percent_text(times.mask_share)} of a step",
    )
    if why_not_judged:
        reason = f"speed is not judged: {why_not_judged}"
        return Judgement(gate="overhead", verdict=Verdict.NOT_JUDGED, reason=reason, evidence=evidence)
    reason = f"{reason}; this test allows {percent_text(limit)}"
    if timing.decision == "open":
        why = timing.disturbance or "the evidence does not decide"
        remedy = "to decide: a larger --cudagraph-time-budget"
        reason = f"{reason}: {why}"
        return Judgement(gate="overhead", verdict=Verdict.INCONCLUSIVE, reason=reason, evidence=evidence, remedy=remedy)
    if timing.decision == "pass":
        return Judgement(gate="overhead", verdict=Verdict.PASSED, reason=reason, evidence=evidence)
    accept = math.ceil(times.overhead.high * _STEP) / _STEP if math.isfinite(times.overhead.high) else None
    remedy = "" if accept is None else f"to accept: max_overhead={accept:.2f}"
    return Judgement(gate="overhead", verdict=Verdict.FAILED, reason=reason, evidence=evidence, remedy=remedy)


def _interval_text(overhead: Interval) -> str:
    if not math.isfinite(overhead.high) or not math.isfinite(overhead.low):
        return "too few blocks for an interval"
    return f"95% interval {percent_text(overhead.low)} to {percent_text(overhead.high)}"
