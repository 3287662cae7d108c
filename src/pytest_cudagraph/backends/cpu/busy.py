"""How long the operations of a tape take without what lies between them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable


def time_alone_ns(steps: Iterable[Callable[[], object]]) -> float:
    """The sum over all steps, each between two looks at the clock, less what looking costs."""
    now_ns = time.perf_counter_ns
    looks_ns = [now_ns() for _ in range(32)]
    look_ns = min(later - earlier for earlier, later in itertools.pairwise(looks_ns))
    total_ns = 0.0
    for step in steps:
        start_ns = now_ns()
        step()
        total_ns += max(now_ns() - start_ns - look_ns, 0)
    return total_ns
