"""The backend for NVIDIA GPUs. No GPU has run this code yet."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from pytest_cudagraph.backends.cuda.gpu import Gpu
from pytest_cudagraph.backends.cuda.nodes import DriverLibrary, load_driver
from pytest_cudagraph.backends.cuda.pool import CudaGraphPool
from pytest_cudagraph.backends.generators import GeneratorStates, generators_of, set_states, states_of
from pytest_cudagraph.values import Kind


class CountedRegion:
    """Compiled code whose calls are counted, eager calls and calls during a capture alike.

    A replay launches the kernels without a call, so replays do not count.
    """

    def __init__(self, call: Callable[..., Any], label: str) -> None:
        self._call = call
        self.label = label
        self._executions = 0

    @property
    def executions(self) -> int:
        """Calls that returned. A call that raised does not count."""
        return self._executions

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._call(*args, **kwargs)
        self._executions += 1
        return result


_NS_PER_MS = 1e6


class CudaEventTimer:
    """Time between two events on the current stream. CUDA resolves about 500 ns."""

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


class CudaBackend:
    """CUDA graphs on the GPU ``index`` (the current one if None). ``cuda`` is the seam for tests."""

    kind: Kind = "cuda"

    def __init__(
        self,
        index: int | None = None,
        *,
        cuda: Any = torch.cuda,
        device: str | None = None,
        node_source: DriverLibrary | None = None,
    ) -> None:
        index = cuda.current_device() if index is None else index
        with cuda.device(index):
            self._gpu = Gpu(cuda, index, device or f"cuda:{index}")
        self._node_source = node_source or load_driver()

    @property
    def device(self) -> str:
        """``cuda:0``."""
        return self._gpu.device

    def synchronize(self) -> None:
        """Wait for all work of this GPU. Raises the error of earlier work."""
        self._gpu.synchronize()

    def order_after(self, earlier: Any) -> Any:
        """The current stream. It waits for the stream ``earlier`` if that is another one."""
        if earlier is not None and self._gpu.is_current(earlier):
            return earlier
        stream = self._gpu.current_stream()
        if earlier is not None:
            stream.wait_stream(earlier)
        return stream

    def running(self) -> AbstractContextManager[None]:
        """Inference mode, with this GPU current."""
        return self._gpu.running()

    def pool(self) -> CudaGraphPool:
        """A pool for the graphs of one model."""
        return CudaGraphPool(self._gpu, self._node_source)

    def region(self, call: Callable[..., Any], label: str) -> CountedRegion:
        """Count the executions of compiled code. A replay runs its kernels without this Python call."""
        return CountedRegion(call, label)

    def event_timer(self) -> CudaEventTimer:
        """Device time between two events on the current stream."""
        return CudaEventTimer(self._gpu)

    def rng_state(self, *roots: Any) -> tuple[torch.Tensor, torch.Tensor, GeneratorStates]:
        """The states of the default generators of the CPU and of this GPU, and of this GPU's that ``roots`` hold."""
        on_gpu = self._gpu.cuda.get_rng_state(self._gpu.index)
        return torch.get_rng_state(), on_gpu, states_of(generators_of(self.device, *roots))

    def set_rng_state(self, state: tuple[torch.Tensor, torch.Tensor, GeneratorStates]) -> None:
        """Restore what :meth:`rng_state` returned."""
        torch.set_rng_state(state[0])
        self._gpu.cuda.set_rng_state(state[1], self._gpu.index)
        set_states(state[2])
