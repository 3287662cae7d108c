"""The backend for NVIDIA GPUs: see :class:`~pytest_cudagraph.protocols.Backend`. No GPU has run it yet."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from pytest_cudagraph.backends.cuda.driver import load_driver
from pytest_cudagraph.backends.cuda.gpu import Gpu
from pytest_cudagraph.backends.cuda.nodes import NodeSource, load_bindings
from pytest_cudagraph.backends.cuda.pool import CudaGraphPool
from pytest_cudagraph.backends.cuda.region import CountedRegion
from pytest_cudagraph.backends.cuda.timer import CudaEventTimer
from pytest_cudagraph.values import Kind


class CudaBackend:
    """CUDA graphs on the GPU ``index`` (the current one if None). ``cuda`` is the seam for tests."""

    kind: Kind = "cuda"

    def __init__(
        self,
        index: int | None = None,
        *,
        cuda: Any = torch.cuda,
        device: str | None = None,
        node_source: NodeSource | None = None,
    ) -> None:
        index = cuda.current_device() if index is None else index
        with cuda.device(index):
            self._gpu = Gpu(cuda, index, device or f"cuda:{index}")
        self._node_source = node_source or load_bindings() or load_driver()

    @property
    def device(self) -> str:
        """``cuda:0``."""
        return self._gpu.device

    def synchronize(self) -> None:
        """Wait for all work of this GPU; raises what earlier work has failed with."""
        self._gpu.synchronize()

    def order_after(self, earlier: Any) -> Any:
        """The current stream, which waits for the stream ``earlier`` if that is another one."""
        stream = self._gpu.current_stream()
        if earlier is not None and earlier != stream:
            stream.wait_stream(earlier)
        return stream

    def running(self) -> AbstractContextManager[None]:
        """Inference mode, with this GPU as the current one."""
        return self._gpu.running()

    def pool(self) -> CudaGraphPool:
        """Memory for the graphs of one model."""
        return CudaGraphPool(self._gpu, self._node_source)

    def region(self, call: Callable[..., Any], label: str) -> CountedRegion:
        """Count the executions of compiled code; a replay runs its kernels without this Python call."""
        return CountedRegion(call, label)

    def event_timer(self) -> CudaEventTimer:
        """Device time between two events on the current stream."""
        return CudaEventTimer(self._gpu)

    def rng_state(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The states of the default generators of the CPU and of this GPU."""
        return torch.get_rng_state(), self._gpu.cuda.get_rng_state(self._gpu.index)

    def set_rng_state(self, state: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Put back what :meth:`rng_state` gave."""
        torch.set_rng_state(state[0])
        self._gpu.cuda.set_rng_state(state[1], self._gpu.index)
