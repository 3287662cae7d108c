"""The gates of two modes of an engine: it runs, with its graphs, with the same tokens, without errors, faster."""

from __future__ import annotations

import math

from pytest_cudagraph.decoding.modes.results import EngineMode, EngineModes, ModeFailure, ModeTokens
from pytest_cudagraph.units import factor_text, latency_text, percent_text, plural
from pytest_cudagraph.values import Interval, Judgement, Verdict

FELL_BACK = "fell back to "

_LEAST_GENERATIONS = 5
"""Of each mode. Fewer are in this order by chance more often than once in 100 times."""

_LEAST_ROUNDS = 2

_QUIET = 0.02
"""Waits that are not told. A few belong to every machine."""

_STEP = 0.05
"""Suggested minimums are rounded down to this step."""


def judge_engine(found: EngineModes, *, falls_back: bool) -> Judgement:
    """Failed if a mode gave no result. ``falls_back``: the error of the graphs mode is judged as a fallback."""
    failed = [("eager", found.eager.failure)]
    failed += [] if falls_back else [("graphs", found.graphs.failure)]
    for name, failure in failed:
        if failure is not None:
            reason = f"{found.engine} did not {failure.stage} in the {name} mode: {failure.error}"
            return Judgement(gate="engine", verdict=Verdict.FAILED, reason=reason, evidence=_output(failure))
    loaded = ["eager"] if falls_back else ["eager", "graphs"]
    return Judgement(gate="engine", verdict=Verdict.PASSED, reason=f"{found.engine} generated: {', '.join(loaded)}")


def _output(failure: ModeFailure) -> tuple[str, ...]:
    return ("the end of its output:", *(f"  {line}" for line in failure.output)) if failure.output else ()


def _printed(mode: EngineMode) -> tuple[str, ...]:
    return ("its output:", *(f"  {line}" for line in mode.output)) if mode.output else ()


def falls_back(graphs: EngineMode) -> bool:
    """Whether the engine raised in its load with graphs: serving code would then load it without."""
    return graphs.failure is not None and graphs.failure.is_raised and graphs.failure.stage == "load"


def judge_fallback(found: EngineModes, *, allow_fallback: bool, allow_piecewise: bool) -> Judgement:
    """Not captured if the engine ran without its graphs, by its error or by its receipt. Passed if that is allowed.

    Piecewise graphs leave a part of each step, often the attention, to eager launches. They are allowed apart.
    Not judged if the engine does not tell: nothing is assumed.
    """
    failure, receipt = found.graphs.failure, found.graphs.receipt
    if failure is not None:
        return _fell_back(
            f"eager: with graphs the engine does not load: {failure.error}", _output(failure), allow_fallback
        )
    if receipt is None or not receipt.steps:
        reason = "the engine does not tell which decode steps replayed a graph"
        return Judgement(gate="fallback", verdict=Verdict.NOT_JUDGED, reason=reason)
    steps = plural(receipt.steps, "decode step")
    if receipt.replays == receipt.steps and not receipt.eager:
        if receipt.piecewise:
            return _piecewise(found.graphs, f"{receipt.piecewise} of {steps}", allow_piecewise)
        reason = f"{steps}, all replays of a graph"
        return Judgement(gate="fallback", verdict=Verdict.PASSED, reason=reason)
    reasons = tuple(f"{plural(count, 'step')}: {reason}" for reason, count in receipt.eager.items())
    why = f"eager: {receipt.steps - receipt.replays} of {steps} replayed no graph"
    return _fell_back(why, (*reasons, *_printed(found.graphs)), allow_fallback)


def _piecewise(graphs: EngineMode, which: str, allowed: bool) -> Judgement:
    why = f"piecewise graphs: {which} replayed graphs of pieces, and ran the rest eagerly"
    return _fell_back(why, _printed(graphs), allowed, option="allow_piecewise")


def _fell_back(why: str, evidence: tuple[str, ...], allowed: bool, *, option: str = "allow_fallback") -> Judgement:
    reason = f"{FELL_BACK}{why}"
    if allowed:
        return Judgement(gate="fallback", verdict=Verdict.PASSED, reason=f"{reason} (allowed)", evidence=evidence)
    return Judgement(
        gate="fallback",
        verdict=Verdict.NOT_CAPTURED,
        reason=reason,
        evidence=evidence,
        remedy=f"to accept: {option}=True",
    )


def judge_mode_tokens(found: ModeTokens, max_differing_rows: int) -> Judgement:
    """Wrong if more rows differ from eager's than are allowed. No logits say whether a difference is a tie."""
    same = found.rows - found.differing_rows
    if found.differing_rows <= max_differing_rows:
        also = f", {found.differing_rows} may differ" if found.differing_rows else ""
        reason = f"{same} of {plural(found.rows, 'row')} equal to eager's{also}"
        return Judgement(gate="tokens", verdict=Verdict.PASSED, reason=reason)
    repeats = "eager gives the same tokens in each generation"
    evidence = repeats if found.eager_repeats else "eager itself gives other tokens in another generation"
    return Judgement(
        gate="tokens",
        verdict=Verdict.WRONG,
        reason=f"{found.differing_rows} of {plural(found.rows, 'row')} differ from eager's, first in row {found.row}, "
        f"token {found.position}: eager gives {found.expected}, graphs {found.found}; allowed are {max_differing_rows}",
        evidence=(evidence,),
        remedy="where the modes compute other shapes, and so round differently: max_differing_rows=",
    )


def judge_errors(found: EngineModes, max_error_rate: float) -> Judgement:
    """Failed if more requests fail in the graphs mode than allowed. Those of eager are shown beside."""
    counted = {name: mode.errors for name, mode in (("eager", found.eager), ("graphs", found.graphs)) if mode.errors}
    texts = [f"{name} {each.failed} of {plural(each.requests, 'request')}" for name, each in counted.items()]
    reason = f"failed with all requests at once: {', '.join(texts)}; allowed are {percent_text(max_error_rate)}"
    graphs = counted.get("graphs")
    verdict = Verdict.FAILED if graphs is not None and graphs.rate > max_error_rate else Verdict.PASSED
    evidence = tuple(f"{name}: {each.first}" for name, each in counted.items() if each.first)
    remedy = "to accept: max_error_rate=" if verdict is Verdict.FAILED else ""
    return Judgement(gate="errors", verdict=verdict, reason=reason, evidence=evidence, remedy=remedy)


def judge_mode_speed(found: EngineModes, min_speedup: float, why_not_judged: str) -> Judgement:
    """Passed or failed where the extremes of single generations agree, else inconclusive.

    Among ``n`` generations of each mode, all of one mode are faster than all of the other by chance once in
    ``binomial(2 n, n)`` times, if both are equally fast: 252 for 5. Two processes of each mode, in turn, show what
    differs from process to process.
    """
    speedup = found.speedup
    if speedup is None:
        return Judgement(gate="speedup", verdict=Verdict.NOT_JUDGED, reason="speed was not measured in both modes")
    reason, evidence = f"{speedup_text(speedup)}; this test asks for {factor_text(min_speedup)}", _latencies(found)
    if why_not_judged:
        reason = f"speed is not judged: {why_not_judged}"
        return Judgement(
            gate="speedup", verdict=Verdict.NOT_JUDGED, reason=reason, evidence=(speedup_text(speedup), *evidence)
        )
    if found.rounds < _LEAST_ROUNDS:
        remedy = f"to decide: at least {_LEAST_ROUNDS} processes of each mode, in turn (rounds=)"
        return Judgement(gate="speedup", verdict=Verdict.INCONCLUSIVE, reason=reason, evidence=evidence, remedy=remedy)
    if len(found.graphs.itl_medians_ns) < _LEAST_GENERATIONS:
        remedy = f"to decide: at least {_LEAST_GENERATIONS} generations (generations=)"
        return Judgement(gate="speedup", verdict=Verdict.INCONCLUSIVE, reason=reason, evidence=evidence, remedy=remedy)
    if speedup.low >= min_speedup:
        return Judgement(gate="speedup", verdict=Verdict.PASSED, reason=reason, evidence=evidence)
    if speedup.high < min_speedup:
        steps = math.floor(speedup.low / _STEP + 1e-9)
        accept = round(steps * _STEP, 2) if steps >= 1 else None
        return Judgement(gate="speedup", verdict=Verdict.FAILED, reason=reason, evidence=evidence, accept=accept)
    remedy = "to decide: more generations (generations=), or a quieter machine"
    return Judgement(gate="speedup", verdict=Verdict.INCONCLUSIVE, reason=reason, evidence=evidence, remedy=remedy)


def speedup_text(speedup: Interval) -> str:
    """``graphs are 1.52x as fast as eager (1.40x to 1.61x)``."""
    bounds = f"{factor_text(speedup.low)} to {factor_text(speedup.high)}"
    return f"graphs are {factor_text(speedup.estimate)} as fast as eager ({bounds})"


def _latencies(found: EngineModes) -> tuple[str, ...]:
    medians = [(name, mode.itl_medians_ns) for name, mode in (("eager", found.eager), ("graphs", found.graphs))]
    lines = [f"ITL of {name}: {', '.join(map(latency_text, each))}" for name, each in medians]
    waits = [(name, mode.waited_ratio or 0.0) for name, mode in (("eager", found.eager), ("graphs", found.graphs))]
    lines += [f"{name} waited {percent_text(each)} of its time for a core" for name, each in waits if each > _QUIET]
    return tuple(lines)
