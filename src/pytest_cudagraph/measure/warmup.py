"""Let both arms settle before anything counts: caches, clocks, lazily built code."""

from __future__ import annotations

import math

from pytest_cudagraph import stats
from pytest_cudagraph.measure.timer import ArmName, Timer

WINDOW = 5
"""Calls per window; a window is judged by its second fastest."""

_SHARE = 0.2
"""Of the hard bound."""

_GAIN = 0.01
"""A window that is not faster by more than this has gained nothing."""

_WINDOWS_WITHOUT_GAIN = 3


def warm_up(timer: Timer) -> dict[ArmName, list[float]]:
    """Run windows of 5 calls per arm until neither has become faster, by more than 1 % in all, for three windows.

    Small steps add up: what settles slowly is waited for; noise, which has no direction, is not. Takes at most a fifth
    of the hard bound, but every arm runs once, and twice if the hard bound allows: the first call alone tells nothing
    of the next. Returns the samples in ns per call.
    """
    seen_ns = {name: [timer.sample_ns(name)] for name in timer.calls}
    for name, samples_ns in seen_ns.items():
        _call_until(timer, name, samples_ns, calls=1, limit_ns=timer.bounds.extended_ns)
    best_ns: dict[ArmName, float] = dict.fromkeys(seen_ns, math.inf)
    standing = -1
    while standing < _WINDOWS_WITHOUT_GAIN:
        standing += 1
        for name, samples_ns in seen_ns.items():
            if not _call_until(timer, name, samples_ns, calls=WINDOW, limit_ns=timer.bounds.extended_ns * _SHARE):
                return seen_ns
            level_ns = stats.quantile(samples_ns[-WINDOW:], 0.25)
            if level_ns < best_ns[name] * (1.0 - _GAIN):
                best_ns[name], standing = level_ns, 0
    return seen_ns


def _call_until(timer: Timer, name: ArmName, samples_ns: list[float], *, calls: int, limit_ns: float) -> bool:
    """Add samples; False when the limit left no time for all of them."""
    for _ in range(calls):
        if timer.elapsed_ns + timer.prepare_ns + samples_ns[-1] > limit_ns:
            return False
        samples_ns.append(timer.sample_ns(name))
    return True
