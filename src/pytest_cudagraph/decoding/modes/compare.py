"""Run an engine eagerly and with graphs, each in a process of its own, and judge what they give."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pytest_cudagraph import gate
from pytest_cudagraph.decoding.errors import EngineFailed
from pytest_cudagraph.decoding.modes.engines import Engine, LoadRequest
from pytest_cudagraph.decoding.modes.gates import (
    FELL_BACK,
    falls_back,
    judge_engine,
    judge_errors,
    judge_fallback,
    judge_mode_speed,
    judge_mode_tokens,
)
from pytest_cudagraph.decoding.modes.mode_run import ModeRequest, ModeRun, RowStamps, joined, run_mode
from pytest_cudagraph.decoding.modes.results import EngineMode, EngineModes, ModeTokens
from pytest_cudagraph.decoding.prompts import GenerationSettings
from pytest_cudagraph.decoding.times import Stamps, summary
from pytest_cudagraph.errors import InputError
from pytest_cudagraph.foreign import value_text
from pytest_cudagraph.session.scenario_run import ScenarioContext
from pytest_cudagraph.settings.parsing import flag, fraction, seconds, whole_number
from pytest_cudagraph.stats import summaries
from pytest_cudagraph.values import BatchReport, Interval, Judgement, Medians, Receipt, Timing, Verdict
from pytest_cudagraph.values.timings import Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class ModesRequest:
    """What a test asks of an engine. Raises :class:`~pytest_cudagraph.InputError`."""

    engine: Engine
    prompts: Sequence[Sequence[int]]
    eager: Mapping[str, Any]
    graphs: Mapping[str, Any]
    allow_fallback: bool
    allow_piecewise: bool
    max_differing_rows: int
    generations: int
    rounds: int
    requests: int
    max_error_rate: float
    timeout_s: float

    def __post_init__(self) -> None:
        if not isinstance(self.engine, Engine) or isinstance(self.engine, type):
            raise InputError(
                "engine_modes takes an engine with name and load(request, **arguments), as vllm(...) and "
                f"transformers_engine(...) give it; found {value_text(self.engine)}"
            )
        for key in ("eager", "graphs"):
            found = getattr(self, key)
            if not isinstance(found, Mapping) or not all(isinstance(each, str) for each in found):
                raise InputError(f"{key} takes a mapping of the mode's arguments by name; found {value_text(found)}")
        for key, parse in _PARSERS.items():
            try:
                parse(getattr(self, key))
            except ValueError as allowed:
                raise InputError(f"{key} takes {allowed}; found {value_text(getattr(self, key))}") from None


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "allow_fallback": flag,
    "allow_piecewise": flag,
    "max_differing_rows": whole_number,
    "generations": functools.partial(whole_number, least=1),
    "rounds": functools.partial(whole_number, least=1),
    "requests": whole_number,
    "max_error_rate": fraction(),
    "timeout_s": seconds,
}


def token_ids(prompts: Any) -> list[list[int]]:
    """Prompts as lists of token ids. Raises :class:`~pytest_cudagraph.InputError`."""
    rows = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    is_batch = isinstance(rows, Sequence) and not isinstance(rows, str) and len(rows)
    if not is_batch or not all(isinstance(row, Sequence) and len(row) and all(map(_is_id, row)) for row in rows):
        raise InputError(f"prompts are token ids (rows, n), with at least one of each; found {value_text(prompts)}")
    return [list(row) for row in rows]


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModesRun:
    """Both modes on one device. The case has one batch size, that of the prompts, and one output length."""

    request: ModesRequest
    scene: ScenarioContext
    keeps_entry: bool = True

    def run_once(self) -> None:
        """Generate once in the eager mode, and judge nothing: a run without ``--cudagraph``."""
        failure = self._run("eager", 0).mode.failure
        if failure is not None:
            found = EngineModes(
                engine=self.request.engine.name, batch_size=1, output_length=self._count,
                eager=EngineMode(failure=failure), graphs=EngineMode(),
            )  # fmt: skip
            judgement = judge_engine(found, falls_back=False)
            raise EngineFailed("\n".join((judgement.reason, *judgement.evidence)))

    def batch(self) -> BatchReport:
        """Run the modes in turn, compare their tokens, and measure what is equal."""
        request, size = self.request, self.scene.case.batch_sizes[0]
        if self.scene.device_context.device.kind == "cuda":
            torch.cuda.empty_cache()  # what earlier tests left there would be missing to the engine
        eagers, graphs = list[ModeRun](), list[ModeRun]()
        # What is not judged needs no second process.
        rounds = 1 if self.scene.device_context.why_not_judged else request.rounds
        for _ in range(rounds):
            eagers.append(self._run("eager", request.generations))
            _check_eager(eagers[-1].mode)
            if eagers[-1].mode.failure is None:
                graphs.append(self._run("graphs", request.generations))
            eager, graph = joined(eagers), joined(graphs)
            found = EngineModes(
                keeps_entry=self.keeps_entry,
                engine=request.engine.name, batch_size=size, output_length=self._count, rounds=len(eagers),
                eager=eager.mode, graphs=graph.mode, tokens=_compared(eager, graph),
            )  # fmt: skip
            report = BatchReport(
                batch_size=size, judgements=self._exact(found), min_speedup=self.scene.case.min_speedup[size],
                scenario=found,
            )  # fmt: skip
            if report.verdict.fails or graph.mode.failure is not None:
                break
        return report if report.verdict.fails else self._timed(report, found, eager, graph)

    @property
    def _count(self) -> int:
        return GenerationSettings.of(self.scene.case).output_length

    def _run(self, mode: str, generations: int) -> ModeRun:
        request, device_context = self.request, self.scene.device_context
        self.scene.progress(f"{request.engine.name}, {mode}")
        load = LoadRequest(
            graphs=mode == "graphs",
            rows=len(request.prompts),
            device=device_context.backend.device,
            threads=device_context.device.threads,
        )
        mode_request = ModeRequest(
            engine=request.engine, load=load, arguments=dict(getattr(request, mode)), prompts=request.prompts,
            count=self._count, generations=generations, requests=request.requests if generations else 0,
        )  # fmt: skip
        return run_mode(mode_request, request.timeout_s)

    def _exact(self, found: EngineModes) -> tuple[Judgement, ...]:
        ran = judge_engine(found, falls_back=falls_back(found.graphs))
        if ran.verdict.fails:
            return (ran,)
        allow = {key: getattr(self.request, key) for key in ("allow_fallback", "allow_piecewise")}
        used = judge_fallback(found, **allow)
        if found.tokens is None:
            return (ran, used)
        judgements = (ran, used, judge_mode_tokens(found.tokens, self.request.max_differing_rows))
        return (*judgements, judge_errors(found, self.request.max_error_rate)) if self.request.requests else judgements

    def _timed(self, report: BatchReport, found: EngineModes, eager: ModeRun, graphs: ModeRun) -> BatchReport:
        found = replace(found, eager=_with_times(eager), graphs=_with_times(graphs))
        found = replace(found, speedup=_speedup(found.eager, found.graphs))
        why_not = self.scene.device_context.why_not_judged
        speed = judge_mode_speed(found, self.scene.case.min_speedup[report.batch_size], why_not)
        report = replace(report, judgements=(*report.judgements, speed), scenario=found, speedup=found.speedup)
        if not found.has_entry:
            return report
        timing = _timing(found, speed.verdict, self.scene.case.min_speedup[report.batch_size])
        return self._against_baseline(report, found, replace(timing, measure_ns=_spent_ns(eager) + _spent_ns(graphs)))

    def _against_baseline(self, report: BatchReport, found: EngineModes, timing: Timing) -> BatchReport:
        """The inter-token latency with graphs is what an entry keeps, and what is compared with the saved one."""
        case, device_context = self.scene.case, self.scene.device_context
        figures = {} if found.graphs.times is None else found.graphs.times.figures()
        figures.pop("itl", None)
        receipt = Receipt(
            batch_size=report.batch_size, operations=None, kernels=None, not_counted="the graphs are the engine's own"
        )
        batch = device_context.measured_batch(case.name, report.batch_size, timing, receipt, figures)
        batch = replace(batch, test=case.nodeid)
        latency, comparison = gate.judge_baseline(batch, case.max_slowdown)
        return replace(
            report,
            judgements=(*report.judgements, latency, *gate.judge_figures(batch, case.max_slowdown)),
            figures=figures,
            timing=timing,
            receipt=receipt,
            baseline=batch.saved,
            comparison=comparison,
        )


def _check_eager(mode: EngineMode) -> None:
    if mode.receipt is not None and mode.receipt.replays:
        raise InputError(
            f"the eager mode runs without graphs; found {mode.receipt.replays} of {mode.receipt.steps} decode steps "
            "that replayed one: eager= must turn them off"
        )


def _compared(eager: ModeRun, graphs: ModeRun) -> ModeTokens | None:
    """The tokens of each generation of graphs against those of eager's with the same number."""
    if not eager.generations or not graphs.generations:
        return None
    differing: dict[int, tuple[int, int, int]] = {}
    for expected, found in zip(eager.generations, graphs.generations, strict=True):
        for row, (one, other) in enumerate(zip(expected, found, strict=True)):
            if one.tokens != other.tokens:
                differing.setdefault(row, _first_difference(one.tokens, other.tokens))
    at = min(differing, default=None)
    first: tuple[int | None, ...] = (None, None, None) if at is None else differing[at]
    return ModeTokens(
        rows=len(eager.generations[0]),
        differing_rows=len(differing),
        row=at,
        position=first[0],
        expected=first[1],
        found=first[2],
        eager_repeats=len({tuple(row.tokens for row in each) for each in eager.generations}) == 1,
    )


def _first_difference(expected: Sequence[int], found: Sequence[int]) -> tuple[int, int, int]:
    return next((at, *pair) for at, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1])


def fallback_notes(batch: BatchReport) -> tuple[str, ...]:
    """That the engine fell back, where the test allows it. Else it would pass silently."""
    found = [each for each in batch.judgements if each.gate == "fallback" and not each.verdict.fails]
    return tuple(each.reason for each in found if each.reason.startswith(FELL_BACK))


def _with_times(run: ModeRun) -> EngineMode:
    if not run.generations:
        return run.mode
    stamps = [[_stamps(row) for row in generation] for generation in run.generations]
    times = summary([row for generation in stamps for row in generation], 1)
    per_token_ns = [_time_per_token_ns(generation) for generation in run.generations]
    medians_ns = tuple(summaries.median([gap for row in generation for gap in row.itl_ns]) for generation in stamps)
    return replace(
        run.mode,
        times=replace(times, generations=len(stamps), time_per_token=summaries.latency_summary(per_token_ns)),
        itl_medians_ns=medians_ns,
    )


def _stamps(row: RowStamps) -> Stamps:
    return Stamps(start_ns=row.start_ns, tokens_ns=row.stamps_ns)


def _time_per_token_ns(generation: Sequence[RowStamps]) -> float:
    """The time from the request of a generation to its last token, over all of its tokens."""
    last = max(generation, key=lambda row: row.stamps_ns[-1])
    return (last.stamps_ns[-1] - last.start_ns) / sum(len(row.tokens) for row in generation)


def _speedup(eager: EngineMode, graphs: EngineMode) -> Interval | None:
    """None unless both modes were timed. Several tokens at once can make a median 0.

    A mode that waited for a core took at most that share less without other work.
    """
    eager_ns, graphs_ns = eager.itl_medians_ns, graphs.itl_medians_ns
    if not eager_ns or not graphs_ns or min(*eager_ns, *graphs_ns) <= 0:
        return None
    return Interval(
        estimate=summaries.median(eager_ns) / summaries.median(graphs_ns),
        low=min(eager_ns) / max(graphs_ns) * (1 - (eager.waited_ratio or 0.0)),
        high=max(eager_ns) / min(graphs_ns) / (1 - (graphs.waited_ratio or 0.0)),
    )


def _spent_ns(run: ModeRun) -> int:
    return sum(max(row.stamps_ns[-1] - row.start_ns for row in generation) for generation in run.generations)


_TO_SIGMA = 1.4826
"""From the median distance to a standard deviation."""

_DECISIONS: dict[Verdict, Decision] = {Verdict.PASSED: "pass", Verdict.FAILED: "fail"}


def _timing(found: EngineModes, verdict: Verdict, target_ratio: float) -> Timing:
    """Both modes as two arms: each generation is a block, and its median inter-token latency a sample."""
    eager_ns, graphs_ns = found.eager.itl_medians_ns, found.graphs.itl_medians_ns
    assert found.speedup is not None
    eager, replay = summaries.latency_summary(eager_ns), summaries.latency_summary(graphs_ns)
    log_ratios = [math.log(one / other) for one, other in zip(eager_ns, graphs_ns, strict=True)]
    middle = summaries.median(log_ratios)
    return Timing(
        eager=eager,
        replay=replay,
        medians=Medians(eager_ns=eager.median_ns, replay_ns=replay.median_ns),
        speedup=found.speedup,
        decision=_DECISIONS.get(verdict, "open"),
        target_ratio=target_ratio,
        blocks=len(graphs_ns),
        noise_ratio=_TO_SIGMA * summaries.median([abs(each - middle) for each in log_ratios]),
        detectable_ratio=math.inf,
        measure_ns=0,
        seed=0,
    )
