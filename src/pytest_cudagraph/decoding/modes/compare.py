"""Run an engine eagerly and with graphs, each in a process of its own, and judge what they give."""

from __future__ import annotations

import functools
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
from pytest_cudagraph.decoding.modes.mode_run import ModeRequest, ModeRun, joined, run_mode
from pytest_cudagraph.decoding.modes.mode_times import speedup_of, spent_ns, timing_of, with_times
from pytest_cudagraph.decoding.modes.results import EngineMode, EngineModes, ModeTokens
from pytest_cudagraph.decoding.prompts import GenerationSettings
from pytest_cudagraph.errors import InputError
from pytest_cudagraph.foreign import value_text
from pytest_cudagraph.session.scenario_run import ScenarioContext
from pytest_cudagraph.settings.parsing import flag, fraction, seconds, whole_number
from pytest_cudagraph.values import BatchReport, Judgement, Receipt, Timing


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
        found = replace(found, eager=with_times(eager), graphs=with_times(graphs))
        found = replace(found, speedup=speedup_of(found.eager, found.graphs))
        why_not = self.scene.device_context.why_not_judged
        speed = judge_mode_speed(found, self.scene.case.min_speedup[report.batch_size], why_not)
        report = replace(report, judgements=(*report.judgements, speed), scenario=found, speedup=found.speedup)
        if not found.has_entry:
            return report
        timing = timing_of(found, speed.verdict, self.scene.case.min_speedup[report.batch_size])
        return self._against_baseline(report, found, replace(timing, measure_ns=spent_ns(eager) + spent_ns(graphs)))

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
