"""Times eager and replay in turn, until the stopping rule decides or the time budget ends.

One timed interval: synchronise, read the clock, call, synchronise, read the clock. The hard bound does not depend on
the stopping rule: no work starts whose expected end is after it (docs/statistics.md).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pytest_cudagraph import stats
from pytest_cudagraph.gc_pause import gc_paused
from pytest_cudagraph.measure.sampling import Disturbance, HealthFilter, Progress, Sampling
from pytest_cudagraph.measure.timer import ArmName, Bounds, Call, ClockTooCoarse, Timer, warm_up
from pytest_cudagraph.protocols import Clock, EventTimer, StoppingRule
from pytest_cudagraph.stats import summaries
from pytest_cudagraph.units import percent_text, plural, seconds_text
from pytest_cudagraph.values import Block, Interval, Latency, Medians, Timing

_EVENT_SAMPLES = 7
_NOTABLE_DRIFT_RATIO = 1.10
_NOTABLE_DISTURBED_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Arms:
    """The timed callables, without arguments. ``compiled`` is only shown, never selected."""

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
    disturbance: Disturbance | None = None,
    cpu_time_ns: Callable[[], int] | None = None,
) -> Timing:
    """Time eager and replay in random order until ``rule`` has finished or the time is over.

    Always returns a :class:`~pytest_cudagraph.values.Timing`. After too few samples its decision is ``open``, and its
    notes say why. Latencies are in ns per call. ``prepare`` runs before every sample, outside its interval. If calls
    change state (a cache, a position), it restores the same state for both arms. The garbage collector is off during
    the measurement, and on again also after an exception of an arm, which passes through. A single call that takes
    longer than the bound is not interrupted. ``disturbance`` names what disturbed the device since its last call, or is
    empty. Blocks of that time are discarded, and more are taken while time is left. ``cpu_time_ns`` reads the CPU time
    of this thread, for calls that compute on it. A block that mostly waited for a CPU is discarded too: both arms have
    such waits, which push every ratio to 1.
    """
    calls: dict[ArmName, Call] = {"eager": arms.eager, "replay": arms.replay}
    if arms.compiled is not None:
        calls["compiled"] = arms.compiled
    # A collection takes milliseconds of one arm's sample. None is run before, which would take a tenth of a second.
    with gc_paused():
        timer = Timer(calls=calls, clock=clock, synchronize=synchronize, bounds=bounds, prepare=prepare)
        warm_ns = warm_up(timer)
        health = HealthFilter(disturbance=disturbance)
        sampling = Sampling(
            timer=timer, rule=rule, rng=random.Random(seed), warm_ns=warm_ns, health=health, cpu_time_ns=cpu_time_ns
        )
        sampling.run(progress)
        device_ns = _event_samples(event_timer, timer, sampling.expected_ns[True])
    return _timing(sampling, rule, device_ns, seed)


def _event_samples(event_timer: EventTimer | None, timer: Timer, expected_ns: float) -> list[float]:
    """A few readings of the replay by device events, in ns, after the measurement and within its bound.

    ``expected_ns`` is an upper estimate of the time of the first.
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
    """The result; if not even one quad fitted into the bound, from the calls of the warm-up."""
    timer, blocks = sampling.timer, sampling.blocks
    measure_ns = timer.elapsed_ns  # without the computation of the interval
    measured = bool(blocks)
    if not measured:
        blocks = [Block(eager_ns=min(sampling.warm_ns["eager"]), replay_ns=min(sampling.warm_ns["replay"]))]
    selected = stats.blocks_judged_by(rule, blocks)
    noise_ratio = summaries.spread(selected.undisturbed)
    latency = {n: summaries.latency_summary(s or sampling.warm_ns[n]) for n, s in sampling.samples_ns.items()}
    drift_ratio = summaries.drift_ratio([block.eager_ns for block in blocks])
    speedup = _speedup(selected, rule.boundary_ratio, sampling.too_coarse, latency)
    return Timing(
        eager=latency["eager"],
        replay=latency["replay"],
        compiled=latency.get("compiled"),
        device_replay=summaries.latency_summary(device_ns) if device_ns else None,
        medians=_medians(sampling.block_samples_ns if measured else [sampling.warm_ns], selected, speedup.estimate),
        speedup=speedup,
        decision=rule.decision,
        target_ratio=rule.target_ratio,
        blocks=len(blocks),
        noise_ratio=noise_ratio,
        detectable_ratio=summaries.detectable_ratio(noise_ratio, len(selected.undisturbed)),
        measure_ns=measure_ns,
        seed=seed,
        extended=timer.extended,
        drift_ratio=drift_ratio,
        inner_calls=timer.inner_calls,
        discarded=sampling.health.discarded,
        disturbance="; ".join(sampling.health.reasons),
        notes=_notes(sampling, measured, drift_ratio, selected),
        weighed=rule.weighed() if isinstance(rule, stats.EvidenceRule) and rule.decision == "open" else None,
    )


def _medians(
    samples_ns: Sequence[Mapping[ArmName, Sequence[float]]], selected: stats.SelectedBlocks, speedup: float
) -> Medians:
    """``samples_ns`` are those of each block."""
    low, _, high = selected.window
    judged = [of_block for of_block, log in zip(samples_ns, selected.log_ratios, strict=True) if low <= log <= high]
    arms = {name: [each for of_block in judged for each in of_block[name]] for name in samples_ns[0]}
    eager_ns, replay_ns = summaries.median(arms["eager"]), summaries.median(arms["replay"])
    factor = math.sqrt(speedup * replay_ns / eager_ns)
    compiled_ns = arms.get("compiled")
    return Medians(
        eager_ns=eager_ns * factor,
        replay_ns=replay_ns / factor,
        compiled_ns=summaries.median(compiled_ns) if compiled_ns else None,
    )


def _speedup(
    selected: stats.SelectedBlocks,
    boundary_ratio: float | None,
    too_coarse: ClockTooCoarse | None,
    latency: Mapping[ArmName, Latency],
) -> Interval:
    speedup = summaries.speedup_interval(
        selected.undisturbed,
        stats.evidence,
        boundary_ratio=boundary_ratio,
        estimate_log=selected.estimate_log,
        differences=selected.differences,
    )
    if too_coarse is None:
        return speedup
    return too_coarse.widen(speedup, eager_ns=latency["eager"].median_ns, replay_ns=latency["replay"].median_ns)


def _notes(sampling: Sampling, measured: bool, drift_ratio: float, selected: stats.SelectedBlocks) -> tuple[str, ...]:
    health, notes = sampling.health, []
    if health.discarded > _NOTABLE_DISTURBED_SHARE * (health.discarded + len(sampling.blocks)):
        why = "; ".join(health.reasons)
        notes.append(f"{plural(health.discarded, 'block')} discarded, {len(sampling.blocks)} kept: {why}")
    if not measured:
        bound = seconds_text(sampling.timer.bounds.extended_ns)
        too_short = f"the time budget of {bound} was too short for timed samples"
        cause = "no block is left" if health.discarded else too_short
        notes.append(f"{cause}: the figures are from the warm-up")
    if sampling.too_coarse is not None:
        notes.append(sampling.too_coarse.note)
    if max(drift_ratio, 1 / drift_ratio) > _NOTABLE_DRIFT_RATIO:
        change = percent_text(abs(drift_ratio - 1.0))
        direction = "slower" if drift_ratio > 1.0 else "faster"
        notes.append(f"eager became {change} {direction} during the measurement; the pairing of samples cancels that")
    disturbed_share = selected.disturbed / len(selected.log_ratios)
    if disturbed_share > _NOTABLE_DISTURBED_SHARE:
        share = percent_text(disturbed_share)
        notes.append(f"only one arm was disturbed in {share} of the blocks, which are excluded")
    if not selected.is_quiet_known:
        notes.append("only one arm was disturbed in most of the blocks: the figures include all blocks")
    return tuple(notes)
