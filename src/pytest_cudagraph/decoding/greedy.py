"""Greedy generation of one batch, gated: tokens and steps exactly, then time."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from pytest_cudagraph import audit, gate, hazards
from pytest_cudagraph.base_revision.comparison import AgainstBase
from pytest_cudagraph.base_revision.judge import judge_base
from pytest_cudagraph.check.compare import Tolerance
from pytest_cudagraph.decoding.agreement import compare_with_eager
from pytest_cudagraph.decoding.decoder import Decoder, check_length, check_members
from pytest_cudagraph.decoding.engine import DecodeEngine, call_decoder, padded
from pytest_cudagraph.decoding.gates import judge_steps, judge_tokens
from pytest_cudagraph.decoding.prefill import prefill_bytes
from pytest_cudagraph.decoding.results import Generation, TokenAgreement, TokenDifference
from pytest_cudagraph.decoding.times import RepeatedSteps, per_step, time_generations
from pytest_cudagraph.errors import CaptureRefusal
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.pipeline.batch_timing import ArmsBudget, time_arms
from pytest_cudagraph.pipeline.device_context import DeviceContext
from pytest_cudagraph.protocols import ShowProgress
from pytest_cudagraph.settings.case import Case
from pytest_cudagraph.units import to_ns
from pytest_cudagraph.values import BatchReport, Finding, GraphReport, Judgement


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyRun:
    """Greedy generations on one device. ``case`` has one prompt length and one output length."""

    engine: DecodeEngine
    case: Case
    device_context: DeviceContext
    progress: ShowProgress
    prompt_lengths: tuple[int, ...] = ()
    """All that the test generates from."""

    def batches(self, prompts: torch.Tensor | None) -> list[BatchReport]:
        """Run every batch size, with random prompts unless some are given."""
        engine, length = self.engine, self.case.prompt_lengths[0]
        device = self.device_context.backend.device
        return [
            self.batch(random_prompts(size, length, engine.vocabulary, device) if prompts is None else prompts)
            for size in self.case.batch_sizes
        ]

    def batch(self, prompts: torch.Tensor) -> BatchReport:
        """Compare with eager, then measure what is equal: a wrong generation has no speed."""
        size, count = prompts.shape[0], self.case.output_lengths[0]
        self.progress(f"generate batch {size}")
        tolerance = Tolerance(rtol=self.case.rtol, atol=self.case.atol)
        tokens, receipt = compare_with_eager(self.engine, prompts, count, tolerance)
        generation = Generation(
            batch_size=size,
            prompt_length=prompts.shape[1],
            output_length=count,
            receipt=receipt,
            tokens=tokens if isinstance(tokens, TokenAgreement) else None,
            prompt_lengths=self.prompt_lengths,
        )
        findings = self._hazards(size) if isinstance(tokens, TokenDifference) and tokens.same_shapes else ()
        exact = (judge_steps(receipt), judge_tokens(tokens, exact=self.case.exact, findings=findings))
        report = BatchReport(
            batch_size=size,
            judgements=exact,
            min_speedup=self.case.min_speedup[size],
            scenario=generation,
        )
        return report if report.verdict.fails else self._measured(report, generation, prompts)

    def _hazards(self, size: int) -> tuple[Finding, ...]:
        """What the audit finds in a decode step, to name the line that makes a replay wrong."""
        backend, decoder = self.device_context.backend, self.engine.decoder
        decoder.reset()
        tokens = torch.zeros(size, 1, dtype=torch.int64, device=backend.device)
        found = audit.audit(functools.partial(call_decoder, decoder), Example(args=(tokens,), kwargs={}), backend)
        return tuple(each for each in found.findings if each.level == "error")

    def _measured(self, report: BatchReport, generation: Generation, prompts: torch.Tensor) -> BatchReport:
        case, size = self.case, report.batch_size
        budget = ArmsBudget(min_speedup=case.min_speedup[size], budget_ns=to_ns(case.time_budget), seed=_seed(case))
        times = time_generations(self.engine, prompts, generation.output_length, self.device_context, budget.budget_ns)
        # At the graph's own size, so that both arms compute the same.
        rows = self.engine.rows_of_graph(size)
        with self.device_context.backend.running():
            steps = RepeatedSteps(self.engine, padded(prompts, rows))
            show = functools.partial(self._show, size)
            timing = time_arms(steps.arms(), budget, steps.rewind, self.device_context, show)
        timing = per_step(timing, steps.steps)
        memory = prefill_bytes(self.engine.decoder, padded(prompts, rows))
        graph = self.engine.graph(rows)
        receipt = replace(graph.receipt, replays=graph.replays)
        batch = self.device_context.measured_batch(case.name, size, timing, receipt, times.figures())
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
        self.progress(f"measure batch {size}, {line}")


def report_of(
    case: Case,
    device_context: DeviceContext,
    batches: Sequence[BatchReport] = (),
    *,
    refused: CaptureRefusal | None = None,
    against_base: AgainstBase | None = None,
) -> GraphReport:
    """The report of one prompt length and output length. ``refused`` ended the captures."""
    if against_base is not None:
        batches = [_with_base(case, each, against_base, device_context.why_not_judged) for each in batches]
    fix = "" if refused is None else f"fix: {refused.fix or hazards.CATALOGUE[refused.hazard].fix}"
    return GraphReport(
        nodeid=case.nodeid,
        name=case.name,
        device=device_context.device,
        compile_mode="none",
        batches=tuple(batches),
        judgements=() if refused is None else (gate.refused(refused, fix=fix),),
        min_source=replace(case.min_source, marker="decode(min_speedup"),
        update_option=device_context.update_option,
    )


def _with_base(case: Case, batch: BatchReport, base: AgainstBase, why_not_judged: str) -> BatchReport:
    found = base.find(case.name, batch.batch_size)
    judgement = judge_base(found, base.max_slowdown, why_not_judged)
    return replace(batch, base=found, judgements=(*batch.judgements, judgement))


def _seed(case: Case) -> int:
    return zlib.crc32(case.name.encode(errors="surrogatepass"))


def check_lengths(decoder: Decoder, case: Case) -> None:
    """Refuse lengths that the decoder cannot hold, before any of them is measured. Raises InputError."""
    check_members(decoder)
    for prompt_length in case.prompt_lengths:
        for output_length in case.output_lengths:
            check_length(decoder, prompt_length, output_length)


def run_once(decoder: Decoder, case: Case, prompts: torch.Tensor | None) -> None:
    """Generate once per batch size, eagerly, and judge nothing: a run without ``--cudagraph``."""
    with DecodeEngine(decoder, case.batch_sizes, capture=False) as engine:
        for size in case.batch_sizes:
            own = random_prompts(size, case.prompt_lengths[0], engine.vocabulary, engine.device)
            engine.generate(own if prompts is None else prompts, case.output_lengths[0], graphs=False)


def random_prompts(rows: int, length: int, vocabulary: int, device: str) -> torch.Tensor:
    """The same token ids in each run. Every row differs."""
    generator = torch.Generator().manual_seed(rows * 1_000_003 + length)
    return torch.randint(0, vocabulary, (rows, length), generator=generator).to(device)
