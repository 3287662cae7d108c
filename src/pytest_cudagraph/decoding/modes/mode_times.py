"""The times of both modes: per token, their quotient, and both as the arms of an entry of a baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from pytest_cudagraph.decoding.modes.mode_run import ModeRun, RowStamps
from pytest_cudagraph.decoding.modes.results import EngineMode, EngineModes
from pytest_cudagraph.decoding.times import Stamps, summary
from pytest_cudagraph.stats import summaries
from pytest_cudagraph.values import Interval, Medians, Timing, Verdict
from pytest_cudagraph.values.timings import Decision


def with_times(run: ModeRun) -> EngineMode:
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


def speedup_of(eager: EngineMode, graphs: EngineMode) -> Interval | None:
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


def spent_ns(run: ModeRun) -> int:
    return sum(max(row.stamps_ns[-1] - row.start_ns for row in generation) for generation in run.generations)


_TO_SIGMA = 1.4826
"""From the median distance to a standard deviation."""

_DECISIONS: dict[Verdict, Decision] = {Verdict.PASSED: "pass", Verdict.FAILED: "fail"}


def timing_of(found: EngineModes, verdict: Verdict, target_ratio: float) -> Timing:
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
