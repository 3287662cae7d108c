"""Guided generation of one batch, gated: steps, masks, tokens and outputs exactly, then time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from pytest_cudagraph.decoding.agreement import compare_with_eager
from pytest_cudagraph.decoding.gates import judge_steps, judge_tokens
from pytest_cudagraph.decoding.guided import Choose, GuidedEngine, outputs_of
from pytest_cudagraph.decoding.guided_gates import judge_mask, judge_outputs, judge_overhead
from pytest_cudagraph.decoding.guided_results import Guided
from pytest_cudagraph.decoding.guided_times import time_guided
from pytest_cudagraph.decoding.prompts import GenerationSettings
from pytest_cudagraph.decoding.results import TokenAgreement
from pytest_cudagraph.decoding.token_masks import first_disallowed
from pytest_cudagraph.errors import InputError
from pytest_cudagraph.foreign import value_text
from pytest_cudagraph.pipeline.device_context import DeviceContext
from pytest_cudagraph.values import BatchReport


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
