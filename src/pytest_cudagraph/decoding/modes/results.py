"""Two modes of an engine, eager and with graphs: the result, and its gates."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from pytest_cudagraph.decoding.results import GenerationReceipt, GenerationTimes, table_of
from pytest_cudagraph.units import bytes_text, factor_text, latency_text, plural, seconds_text, to_seconds
from pytest_cudagraph.values import Interval, Judgement, Table, Verdict

Stage = Literal["start", "load", "generate", "close"]
"""What the process of a mode did when it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeFailure:
    """Why a mode gave no result."""

    stage: Stage
    error: str
    """The engine's own error (``RuntimeError: ...``), or how its process ended."""
    is_raised: bool
    """Whether the engine raised it. Serving code can catch that, and load the engine without graphs."""
    output: tuple[str, ...] = ()
    """The end of what the process printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMode:
    """One mode, measured in a process of its own. None where it failed before, or where nobody tells."""

    load_ns: int | None = None
    """From nothing to an engine that can generate. It includes the capture."""
    capture_ns: int | None = None
    """Of the graphs. None if the engine does not tell."""
    capture_bytes: int | None = None
    """Of the graphs, on the device. None if the engine does not tell."""
    host_bytes: int | None = None
    """Resident memory of the process and of those that it started, after the last generation."""
    device_bytes: int | None = None
    """By how much the used memory of all GPUs grew from before the load. None without NVML."""
    times: GenerationTimes | None = None
    itl_medians_ns: tuple[float, ...] = ()
    """The median inter-token latency of each generation."""
    receipt: GenerationReceipt | None = None
    """Of all decode steps. None if the engine does not tell."""
    failure: ModeFailure | None = None
    output: tuple[str, ...] = ()
    """What the process printed about graphs, else the end of what it printed. Empty after a failure, which has it."""

    def texts(self) -> tuple[str, ...]:
        """Its part of a row."""
        times, receipt = self.times, self.receipt
        replays = "failed" if self.failure else "not told" if receipt is None else receipt.text
        return (
            "-" if self.load_ns is None else seconds_text(self.load_ns),
            self._capture_text(),
            "-" if self.host_bytes is None else bytes_text(self.host_bytes),
            "-" if self.device_bytes is None else bytes_text(self.device_bytes),
            "-" if times is None else latency_text(times.ttft.median_ns),
            "-" if times is None else latency_text(times.itl.median_ns),
            "-" if times is None else f"{times.tokens_per_second:.0f}",
            replays,
        )

    def _capture_text(self) -> str:
        took = "-" if self.capture_ns is None else seconds_text(self.capture_ns)
        return took if self.capture_bytes is None else f"{took}, {bytes_text(self.capture_bytes)}"

    def _taken(self) -> dict[str, float | None]:
        return {
            "load_seconds": None if self.load_ns is None else to_seconds(self.load_ns),
            "capture_seconds": None if self.capture_ns is None else to_seconds(self.capture_ns),
            "capture_bytes": self.capture_bytes,
            "host_bytes": self.host_bytes,
            "device_bytes": self.device_bytes,
        }

    def document(self) -> dict[str, Any]:
        """Its attributes, with times in seconds."""
        return {
            **self._taken(),
            "times": self.times and self.times.document(),
            "itl_medians": [to_seconds(median_ns) for median_ns in self.itl_medians_ns],
            "receipt": self.receipt and asdict(self.receipt),
            "failure": self.failure and asdict(self.failure),
        }

    def properties(self) -> dict[str, str]:
        """What it took, for JUnit."""
        taken = {key: f"{value:.4g}" for key, value in self._taken().items() if value is not None}
        return taken | (self.times.properties() if self.times else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeTokens:
    """The tokens of graphs compared with eager's, row by row."""

    rows: int
    differing_rows: int
    """Rows with another token in any generation. The first other token changes all later ones."""
    row: int | None = None
    """The first difference in the first differing row."""
    position: int | None = None
    """Counted from the first generated token, 0."""
    expected: int | None = None
    found: int | None = None
    eager_repeats: bool = True
    """Whether eager gives the same tokens in each of its generations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModes:
    """An engine in both modes, with the same prompts."""

    engine: str
    batch_size: int
    output_length: int
    eager: EngineMode
    graphs: EngineMode
    tokens: ModeTokens | None = None
    """None unless both modes generated."""
    speedup: Interval | None = None
    """Eager's inter-token latency over that of graphs. The bounds are the extremes of single generations."""

    kind: ClassVar[str] = "modes"
    has_entry: ClassVar[bool] = False

    @property
    def _named(self) -> dict[str, EngineMode]:
        return {"eager": self.eager, "graphs": self.graphs}

    def tables(self, test: str) -> tuple[Table, ...]:
        """Two rows, eager and graphs."""
        titles = "mode|load|capture|host|device|TTFT|ITL|tokens/s|replays"
        return table_of("engine modes", titles, [(test, name, *mode.texts()) for name, mode in self._named.items()])

    def document(self) -> dict[str, Any]:
        """Both modes, with times in seconds."""
        return {
            "engine": self.engine,
            "output_length": self.output_length,
            "tokens": self.tokens and asdict(self.tokens),
            "speedup": self.speedup and asdict(self.speedup),
            **{name: mode.document() for name, mode in self._named.items()},
        }

    def properties(self) -> dict[str, str]:
        """``speedup``, ``graphs_load_seconds``, ``graphs_host_bytes``, ``graphs_itl_seconds`` and so on."""
        speedup = {} if self.speedup is None else {"speedup": f"{self.speedup.estimate:.2f}"}
        modes = self._named.items()
        return speedup | {f"{name}_{key}": text for name, mode in modes for key, text in mode.properties().items()}


FELL_BACK = "fell back to "

_LEAST_GENERATIONS = 5
"""Of each mode. Fewer are in this order by chance more often than once in 100 times."""

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


def judge_mode_speed(found: EngineModes, min_speedup: float, why_not_judged: str) -> Judgement:
    """Passed or failed where the extremes of single generations agree, else inconclusive.

    Among ``n`` generations of each mode, all of one mode are faster than all of the other by chance once in
    ``binomial(2 n, n)`` times, if both are equally fast: 252 for 5. What differs from process to process is not seen.
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
    return tuple(f"ITL of {name}: {', '.join(map(latency_text, each))}" for name, each in medians)
