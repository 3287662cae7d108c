"""Device time by CUDA events: a second reading beside the host clock, never judged."""

from __future__ import annotations

from collections.abc import Callable

from pytest_cudagraph.backends.cuda.gpu import Gpu

_NS_PER_MS = 1e6


class CudaEventTimer:
    """Time between two events on the current stream; CUDA resolves about 500 ns."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def time_ns(self, call: Callable[[], object]) -> float:
        """Nanoseconds of device time around ``call``, gaps while the host had nothing queued included."""
        cuda = self._gpu.cuda
        with cuda.device(self._gpu.index):
            start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
        return float(start.elapsed_time(end)) * _NS_PER_MS
