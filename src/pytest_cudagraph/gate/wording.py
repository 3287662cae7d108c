"""The phrases that several gates share."""

from __future__ import annotations

import math

from pytest_cudagraph.units import factor_text, latency_text, percent_text, plural, seconds_text
from pytest_cudagraph.values import DeviceInfo, Interval, SavedBatch, Timing

SESSION_SPREAD = 0.03
"""How much (one standard deviation, relative) the latency of unchanged code differs between sessions of one machine.

A prior, stated because one saved session cannot tell its own spread. Measured on one virtual machine: 1.3 % between 100
quiet sessions, more beside noisy neighbours; CodSpeed published 2.66 % across hosted runners. See docs/statistics.md.
"""

SESSION_NOISE_LOG = 2 * SESSION_SPREAD
"""Two standard deviations, as a log-ratio: what lies within may be the session and not the code."""

_SOFTWARE = (
    ("driver", "driver"),
    ("cuda", "CUDA"),
    ("torch", "torch"),
    ("python", "Python"),
    ("host_cpu", "host CPU"),
    ("platform", "platform"),
    ("threads", "threads"),
)


def change_text(before_ns: float, after_ns: float) -> str:
    """``151.2 -> 120.0 µs``; both units where they differ: ``1.1 ms -> 980.0 µs``."""
    before, after = latency_text(before_ns), latency_text(after_ns)
    number, unit = before.rsplit(" ", 1)
    return f"{number} -> {after}" if after.endswith(f" {unit}") else f"{before} -> {after}"


def interval_text(speedup: Interval) -> str:
    """``95% interval 1.05-1.09``; in words where too few blocks bound it on neither side."""
    if speedup.low <= 0.0 and math.isinf(speedup.high):
        return "too few blocks for an interval"
    if math.isinf(speedup.high):
        return f"95% interval from {factor_text(speedup.low)}"
    return f"95% interval {speedup.low:.2f}-{speedup.high:.2f}"


def found_text(timing: Timing) -> str:
    """``replay is 1.07x eager (95% interval 1.05-1.09)``."""
    return f"replay is {factor_text(timing.speedup.estimate)} eager ({interval_text(timing.speedup)})"


def timing_text(timing: Timing, device: DeviceInfo | None = None) -> str:
    """``eager 120.0 µs, replay 112.1 µs, 34 interleaved blocks in 0.9 s, noise floor 0.4 %``: medians.

    Times of the CPU twin are labelled ``cpu:``, so that nobody takes them for a GPU's.
    """
    arms = f"eager {latency_text(timing.eager.median_ns)}"
    if timing.compiled is not None:
        arms += f", compiled {latency_text(timing.compiled.median_ns)}"
    label = "cpu: " if device is not None and device.kind == "cpu" else ""
    blocks = plural(timing.blocks, "interleaved block")
    noise = f", noise floor {percent_text(timing.noise_ratio)}" if timing.blocks > 1 else ""
    replay = latency_text(timing.replay.median_ns)
    return f"{label}{arms}, replay {replay}, {blocks} in {seconds_text(timing.measure_ns)}{noise}"


def moved_text(timing: Timing, saved: SavedBatch) -> str:
    """Which side moved since the baseline, medians: the ratio alone does not tell."""
    eager_ns = (saved.eager.median_ns, timing.eager.median_ns)
    replay_ns = (saved.replay.median_ns, timing.replay.median_ns)
    eager, replay = f"({change_text(*eager_ns)})", f"({change_text(*replay_ns)})"
    eager_moved, replay_moved = _moved(*eager_ns), _moved(*replay_ns)
    if not eager_moved and not replay_moved:
        return f"neither eager {eager} nor replay {replay} changed since the baseline"
    if not eager_moved:
        return f"eager did not change {eager}, replay got {replay_moved} than in the baseline {replay}"
    side = f"got {replay_moved}" if replay_moved else "did not change"
    return f"eager got {eager_moved} than in the baseline {eager}, replay {side} {replay}"


def _moved(before_ns: float, after_ns: float) -> str:
    log_change = math.log(after_ns / before_ns)
    if abs(log_change) <= SESSION_NOISE_LOG:
        return ""
    return "slower" if log_change > 0 else "faster"


def software_changes(before: DeviceInfo, after: DeviceInfo) -> tuple[str, ...]:
    """``torch 2.11.0 -> 2.13.0``: everything but the hardware that is not as it was when the baseline was saved."""
    facts = [(words, getattr(before, name), getattr(after, name)) for name, words in _SOFTWARE]
    changed = [f"{words} {old or 'none'} -> {new or 'none'}" for words, old, new in facts if old != new]
    return (f"since the baseline: {', '.join(changed)}",) if changed else ()
