"""Let both arms settle before anything counts: caches, clocks, lazily built code."""

from __future__ import annotations

from pytest_cudagraph.measure.timer import ArmName, Timer

WINDOW = 5
"""Calls per window; a window is judged by its fastest."""

_SHARE = 0.2
"""Of the first bound."""

_STEADY_RATIO = 0.02
_STEADY_WINDOWS = 2


def warm_up(timer: Timer) -> dict[ArmName, list[float]]:
    """Run windows of 5 calls per arm until the fastest of each changes by less than 2 % twice running.

    Takes at most a fifth of the first bound, but every arm runs once, and twice if the hard bound allows: the first
    call alone tells nothing of the next. Returns the samples in ns per call.
    """
    seen_ns = {name: [timer.sample_ns(name)] for name in timer.calls}
    for name, samples_ns in seen_ns.items():
        _call_until(timer, name, samples_ns, calls=1, limit_ns=timer.bounds.extended_ns)
    previous_ns: dict[ArmName, float] = {}
    steady = 0
    while steady < _STEADY_WINDOWS:
        minima_ns: dict[ArmName, float] = {}
        for name, samples_ns in seen_ns.items():
            if not _call_until(timer, name, samples_ns, calls=WINDOW, limit_ns=timer.bounds.first_ns * _SHARE):
                return seen_ns
            minima_ns[name] = min(samples_ns[-WINDOW:])
        steady = steady + 1 if _stands_still(previous_ns, minima_ns) else 0
        previous_ns = minima_ns
    return seen_ns


def _call_until(timer: Timer, name: ArmName, samples_ns: list[float], *, calls: int, limit_ns: float) -> bool:
    """Add samples; False when the limit left no time for all of them."""
    for _ in range(calls):
        if timer.elapsed_ns + samples_ns[-1] > limit_ns:
            return False
        samples_ns.append(timer.sample_ns(name))
    return True


def _stands_still(previous_ns: dict[ArmName, float], minima_ns: dict[ArmName, float]) -> bool:
    if not previous_ns:
        return False
    return all(abs(minima_ns[name] / before_ns - 1.0) < _STEADY_RATIO for name, before_ns in previous_ns.items())
