"""Greedy generation of one batch, gated: tokens and steps exactly, then time."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from pytest_cudagraph import audit, gate
from pytest_cudagraph.decoding.agreement import compare_with_eager, judge_steps, judge_tokens
from pytest_cudagraph.decoding.engine import DecodeEngine, call_decoder
from pytest_cudagraph.decoding.prefill import prefill_bytes
from pytest_cudagraph.decoding.prompts import GenerationSettings, prompts_of
from pytest_cudagraph.decoding.results import Generation, TokenAgreement, TokenDifference
from pytest_cudagraph.decoding.times import RepeatedSteps, per_step, time_generations
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.pipeline.batch_timing import ArmsBudget, time_arms
from pytest_cudagraph.session.scenario_run import ScenarioContext
from pytest_cudagraph.values import BatchReport, Finding, Judgement


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyRun:
    """Greedy generations on one device. The case has one prompt length and one output length."""

    engine: DecodeEngine
    scene: ScenarioContext
    settings: GenerationSettings
    prompt_lengths: tuple[int, ...]
    """All that the test generates from."""

    def batches(self, prompts: torch.Tensor | None) -> list[BatchReport]:
        """Run every batch size, with random prompts unless some are given."""
        length = self.settings.prompt_lengths[0]
        return [
            self.batch(prompts_of(self.engine, size, length) if prompts is None else prompts)
            for size in self.scene.case.batch_sizes
        ]

    def batch(self, prompts: torch.Tensor) -> BatchReport:
        """Compare with eager, then measure what is equal: a wrong generation has no speed."""
        size, count = prompts.shape[0], self.settings.output_length
        self.scene.progress(f"generate batch {size}")
        tokens, receipt = compare_with_eager(self.engine, prompts, count, self.settings.tolerance)
        generation = Generation(
            batch_size=size,
            prompt_length=prompts.shape[1],
            output_length=count,
            receipt=receipt,
            tokens=tokens if isinstance(tokens, TokenAgreement) else None,
            prompt_lengths=self.prompt_lengths,
        )
        findings = self._hazards(size) if isinstance(tokens, TokenDifference) and tokens.same_shapes else ()
        exact = (judge_steps(receipt), judge_tokens(tokens, exact=self.settings.exact, findings=findings))
        report = BatchReport(
            batch_size=size,
            judgements=exact,
            min_speedup=self.scene.case.min_speedup[size],
            scenario=generation,
        )
        return report if report.verdict.fails else self._measured(report, generation, prompts)

    def _hazards(self, size: int) -> tuple[Finding, ...]:
        """What the audit finds in a decode step, to name the line that makes a replay wrong."""
        backend, decoder = self.scene.device_context.backend, self.engine.decoder
        decoder.reset()
        tokens = torch.zeros(size, 1, dtype=torch.int64, device=backend.device)
        found = audit.audit(functools.partial(call_decoder, decoder), Example(args=(tokens,), kwargs={}), backend)
        return tuple(each for each in found.findings if each.level == "error")

    def _measured(self, report: BatchReport, generation: Generation, prompts: torch.Tensor) -> BatchReport:
        case, device_context, settings = self.scene.case, self.scene.device_context, self.settings
        size = report.batch_size
        budget = ArmsBudget(min_speedup=case.min_speedup[size], budget_ns=settings.budget_ns, seed=settings.seed)
        times = time_generations(self.engine, prompts, generation.output_length, device_context, budget.budget_ns)
        # At the graph's own size, so that both arms compute the same.
        rows = self.engine.rows_of_graph(size)
        with device_context.backend.running():
            steps = RepeatedSteps(self.engine, self.engine.padded(prompts, rows), device_context.backend.kind)
            show = functools.partial(self._show, size)
            timing = time_arms(steps.arms(), budget, steps.rewind, device_context, show)
        timing = per_step(timing, steps.steps)
        memory = prefill_bytes(self.engine.decoder, self.engine.padded(prompts, rows))
        graph = self.engine.graph(rows)
        receipt = replace(graph.receipt, replays=graph.replays)
        batch = device_context.measured_batch(case.name, size, timing, receipt, times.figures())
        batch = replace(batch, test=case.nodeid)
        latency, comparison = gate.judge_baseline(batch, case.max_slowdown)
        judgements: tuple[Judgement, ...] = (
            gate.judge_structure(batch, None),
            gate.judge_speedup(batch, budget.min_speedup),
            latency,
            *gate.judge_figures(batch, case.max_slowdown),
        )
        return replace(
            report,
            judgements=(*report.judgements, *judgements),
            scenario=replace(generation, times=times, bytes=memory),
            figures=times.figures(),
            timing=timing,
            receipt=receipt,
            baseline=batch.saved,
            comparison=comparison,
        )

    def _show(self, size: int, line: str) -> None:
        self.scene.progress(f"measure batch {size}, {line}")
