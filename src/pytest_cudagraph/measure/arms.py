"""Time eager against replay, interleaved, until the evidence is in or the budget is out.

Inside one timed interval: synchronise, read the clock, call, synchronise, read the clock. The hard bound is kept here,
outside the stopping rule: nothing is started whose expected end lies beyond it (docs/statistics.md).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_cudagraph import stats
from pytest_cudagraph.gc_pause import gc_paused
from pytest_cudagraph.measure.sampling import HealthFilter, Progress, Sampling, Vet
from pytest_cudagraph.measure.timer import ArmName, Bounds, Call, ClockTooCoarse, Timer, warm_up
from pytest_cudagraph.protocols import Clock, EventTimer, StoppingRule
from pytest_cudagraph.stats import summaries
from pytest_cudagraph.units import percent_text, plural, seconds_text
from pytest_cudagraph.values import Block, Interval, Latency, Timing

_EVENT_SAMPLES = 7
_NOTABLE_DRIFT_RATIO = 1.10
_NOTABLE_DISTURBED_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Arms:
    """What is timed: calls without arguments, on inputs that are ready. ``compiled`` is shown, never judged."""

    eager: Call
    replay: Call
    compiled: Call | None = None


def measure_arms(
    arms: Arms,
    *,
    clock: Clock,
    rule: StoppingRule,
    bounds: Bounds,
    seed: int,
    synchronize: Call = lambda: None,
    prepare: Call | None = None,
    event_timer: EventTimer | None = None,
    progress: Progress | None = None,
    vet: Vet | None = None,
) -> Timing:
    """Interleave eager and replay in random order until ``rule`` has finished or the time is out.

    Always gives a :class:`~pytest_cudagraph.values.Timing`: one that did not get far is ``open`` and says so in its
    notes. Latencies are per call. ``prepare`` is called before every sample, outside its interval: where calls move
    state on (a cache, a position), it brings both arms back to the same step. The automatic garbage collector rests
    meanwhile and is put back also when an arm raises; what an arm raises passes through. A single call that
    outlasts the bound cannot be interrupted. ``vet`` says what has disturbed the device since it was last asked:
    blocks taken meanwhile are thrown away, and others are taken while the time lasts.
    """
    calls: dict[ArmName, Call] = {"eager": arms.eager, "replay": arms.replay}
    if arms.compiled is not None:
        calls["compiled"] = arms.compiled
    # A collection costs milliseconds and falls on whichever arm runs. None before it either: with torch loaded it takes
    # a tenth of a second, and what is not collected disturbs nobody.
    with gc_paused():
        timer = Timer(calls=calls, clock=clock, synchronize=synchronize, bounds=bounds, prepare=prepare)
        warm_ns = warm_up(timer)
        vetting = HealthFilter(vet=vet)
        sampling = Sampling(timer=timer, rule=rule, rng=random.Random(seed), warm_ns=warm_ns, vetting=vetting)
        sampling.run(progress)
        device_ns = _event_samples(event_timer, timer, sampling.expected_ns[True])
    return _timing(sampling, rule, device_ns, seed)


measure = measure_arms
"""Its short name inside the package; from outside, ``pytest_cudagraph.measure`` is this room."""


def _event_samples(event_timer: EventTimer | None, timer: Timer, expected_ns: float) -> list[float]:
    """A few readings of the replay by device events, after the measurement and within its bound.

    ``expected_ns`` is a generous guess of how long the first takes.
    """
    samples_ns: list[float] = []
    if event_timer is None:
        return samples_ns
    while len(samples_ns) < _EVENT_SAMPLES and timer.elapsed_ns + expected_ns <= timer.bounds.extended_ns:
        begin_ns = timer.elapsed_ns
        if timer.prepare is not None:
            timer.prepare()
        samples_ns.append(event_timer.time_ns(timer.calls["replay"]))
        expected_ns = timer.elapsed_ns - begin_ns
    return samples_ns


def _timing(sampling: Sampling, rule: StoppingRule, device_ns: Sequence[float], seed: int) -> Timing:
    """Sum up; where not even one quad fitted, the warm-up's calls are all there is."""
    timer, blocks = sampling.timer, sampling.blocks
    measure_ns = timer.elapsed_ns  # read before the interval is computed, which is no measuring
    measured = bool(blocks)
    if not measured:
        blocks = [Block(eager_ns=min(sampling.warm_ns["eager"]), replay_ns=min(sampling.warm_ns["replay"]))]
    judged = stats.judged(rule, blocks)
    noise_ratio = summaries.spread(judged.undisturbed)
    latency = {n: summaries.latency_summary(s or sampling.warm_ns[n]) for n, s in sampling.samples_ns.items()}
    drift_ratio = summaries.drift_ratio([block.eager_ns for block in blocks])
    return Timing(
        eager=latency["eager"],
        replay=latency["replay"],
        compiled=latency.get("compiled"),
        device_replay=summaries.latency_summary(device_ns) if device_ns else None,
        speedup=_speedup(judged, rule.boundary_ratio, sampling.too_coarse, latency),
        decision=rule.decision,
        target_ratio=rule.target_ratio,
        blocks=len(blocks),
        noise_ratio=noise_ratio,
        detectable_ratio=summaries.detectable_ratio(noise_ratio, len(judged.undisturbed)),
        measure_ns=measure_ns,
        seed=seed,
        extended=timer.extended,
        drift_ratio=drift_ratio,
        inner_calls=timer.inner_calls,
        discarded=sampling.vetting.discarded,
        disturbance="; ".join(sampling.vetting.reasons),
        notes=_notes(sampling, measured, drift_ratio, judged),
        weighed=rule.weighed() if isinstance(rule, stats.EvidenceRule) and rule.decision == "open" else None,
    )


def _speedup(
    judged: stats.SelectedBlocks,
    boundary_ratio: float | None,
    too_coarse: ClockTooCoarse | None,
    latency: Mapping[ArmName, Latency],
) -> Interval:
    speedup = summaries.speedup_interval(
        judged.undisturbed,
        stats.evidence,
        boundary_ratio=boundary_ratio,
        estimate_log=judged.estimate_log,
        differences=judged.differences,
    )
    if too_coarse is None:
        return speedup
    return too_coarse.widen(speedup, eager_ns=latency["eager"].median_ns, replay_ns=latency["replay"].median_ns)


def _notes(sampling: Sampling, measured: bool, drift_ratio: float, judged: stats.SelectedBlocks) -> tuple[str, ...]:
    vetting, notes = sampling.vetting, []
    if vetting.discarded:
        why = "; ".join(vetting.reasons)
        notes.append(f"{plural(vetting.discarded, 'block')} thrown away, {len(sampling.blocks)} kept: {why}")
    if not measured:
        bound = seconds_text(sampling.timer.bounds.extended_ns)
        notes.append(f"the time budget of {bound} left no room for timed samples: these are the calls of the warm-up")
    if sampling.too_coarse is not None:
        notes.append(sampling.too_coarse.note)
    if max(drift_ratio, 1 / drift_ratio) > _NOTABLE_DRIFT_RATIO:
        change = percent_text(abs(drift_ratio - 1.0))
        direction = "slower" if drift_ratio > 1.0 else "faster"
        notes.append(f"eager became {change} {direction} during the measurement; pairing keeps that out of the speedup")
    disturbed_share = judged.disturbed / len(judged.log_ratios)
    if disturbed_share > _NOTABLE_DISTURBED_SHARE:
        share = percent_text(disturbed_share)
        notes.append(f"one arm alone was disturbed in {share} of the blocks, which do not count")
    if not judged.is_quiet_known:
        notes.append("one arm alone was disturbed in most of the blocks: the figures are those of all of them")
    return tuple(notes)
