"""The reference workload: a fixed graph, timed within every measurement; what latencies of other days are divided by.

It runs what the models here run (small operations, launched by a graph), and nothing of what tests may set: no random
numbers, no matrix products in float32 (their precision is a setting), nothing that is split among threads.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import torch

from pytest_cudagraph import stats
from pytest_cudagraph.errors import CudagraphError
from pytest_cudagraph.protocols import Backend, CapturedGraph, Clock, GraphPool
from pytest_cudagraph.values import Latency

_SHARE = 0.1
"""Of a measurement's time, at most."""

_MOST_AT_ONCE = 16
_FEWEST = 10
"""Readings; fewer do not tell a quartile."""

_INTERRUPTED = 4
"""Times the shortest reading. What is beyond is the time of whoever took the processor, and not the reference's own:
counted as such, one interruption of 40 ms would leave a measurement without readings, just where it needs them.
"""

_WARM_CALLS = 3
_ROUNDS = 10
"""Five operations each: 50 kernels, as many as a small model has."""

_SIDE = 32
"""A 32 x 32 matrix: microseconds per operation, and below what torch splits among threads (32768 elements)."""


class Reference:
    """The reference of one device, captured when it is first asked for and kept for the run."""

    def __init__(self, backend: Backend, clock: Clock) -> None:
        self._backend, self._clock = backend, clock
        self._pool: GraphPool | None = None
        self._graph: CapturedGraph | None = None
        self._is_refused = False

    def readings(self) -> Readings:
        """Begin to read beside one measurement; captures and warms up where that has not been done."""
        if self._graph is None and not self._is_refused:
            # Worth having, never worth failing for: without it latencies are compared as they are.
            with contextlib.suppress(CudagraphError, RuntimeError):
                self._graph = self._capture()
            self._is_refused = self._graph is None
        return Readings(self._sample_ns)

    def _sample_ns(self) -> float | None:
        return None if self._graph is None else self._timed_ns(self._graph)

    def _timed_ns(self, graph: CapturedGraph) -> float:
        synchronize, now_ns = self._backend.synchronize, self._clock.now_ns
        synchronize()
        start_ns = now_ns()
        graph.replay()
        synchronize()
        return max(now_ns() - start_ns, self._clock.resolution_ns, 1.0)

    def _capture(self) -> CapturedGraph:
        # float64: the precision of float32 products is a setting of the process.
        device = self._backend.device
        values = torch.linspace(-1.0, 1.0, _SIDE * _SIDE, dtype=torch.float64, device=device).reshape(_SIDE, _SIDE)
        with self._backend.running(), torch.autocast(torch.device(device).type, enabled=False):
            self._pool = self._backend.pool()
            graph = self._pool.capture(_workload, (values,), {}, batch_size=_SIDE)
        for _ in range(_WARM_CALLS):
            graph.replay()
        return graph


class Readings:
    """The reference between the blocks of one measurement: what slows the one slows the other."""

    def __init__(self, sample_ns: Callable[[], float | None]) -> None:
        self._sample_ns = sample_ns
        self._samples_ns: list[float] = []
        self._spent_ns, self._least_ns = 0.0, math.inf

    def keep_up(self, elapsed_ns: float) -> None:
        """Read until the share of the measurement's time is spent, or for now enough is read."""
        for _ in range(_MOST_AT_ONCE):
            if self._spent_ns > elapsed_ns * _SHARE:
                return
            sample_ns = self._sample_ns()
            if sample_ns is None:
                return
            self._samples_ns.append(sample_ns)
            self._least_ns = min(self._least_ns, sample_ns)
            self._spent_ns += min(sample_ns, _INTERRUPTED * self._least_ns)

    def latency(self) -> Latency | None:
        """What was read; None where that is too little."""
        return stats.latency_summary(self._samples_ns) if len(self._samples_ns) >= _FEWEST else None


def _workload(values: torch.Tensor) -> torch.Tensor:
    """Products, comparisons, reductions and sums; no tanh: CPU libraries run even a small one in threads."""
    found = values
    for _ in range(_ROUNDS):
        found = (found @ values).clamp(-1.0, 1.0)
        found = found - found.mean(dim=0) + values
    return found
