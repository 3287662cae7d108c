"""One captured CUDA graph: see :class:`~pytest_cudagraph.protocols.CapturedGraph`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pytest_cudagraph.backends.buffers import BufferedGraph, StaticInputs, poison
from pytest_cudagraph.backends.cuda.gpu import Gpu
from pytest_cudagraph.values import Receipt


class CudaCapturedGraph(BufferedGraph):
    """Copies inputs in and launches, on the caller's current stream. Never waits for the device."""

    def __init__(
        self, gpu: Gpu, graph: Any, inputs: StaticInputs, output: Any, owned: Sequence[torch.Tensor], receipt: Receipt
    ) -> None:
        super().__init__(inputs, output, receipt)
        self._gpu = gpu
        self._graph = graph
        self._owned = tuple(owned)

    @property
    def is_open(self) -> bool:
        """Whether :meth:`close` has not been called."""
        return self._inputs is not None

    def replay(self) -> Any:
        """Launch once on the values that the static inputs hold. Return the same output objects every time."""
        if self._inputs is None:
            raise self._closed_error()
        if torch.is_inference_mode_enabled():
            self._graph.replay()
        else:
            # Some versions of torch write the seeds of a replay to inference tensors.
            with torch.inference_mode():
                self._graph.replay()
        self._replays += 1
        return self._output

    def poison(self) -> None:
        """Fill the outputs in the graph's own memory, in order of the current stream."""
        if self._inputs is None:
            raise self._closed_error()
        for tensor in self._owned:
            poison(tensor)

    def close(self) -> None:
        """Wait for the device, then release graph, inputs and outputs. A second call does nothing."""
        if self._inputs is None:
            return
        graph, held = self._graph, (self._inputs, self._output, self._owned)
        self._graph, self._inputs, self._output, self._owned = None, None, None, ()
        try:
            # A replay may still be running, on any stream, and read and write all this memory.
            self._gpu.synchronize()
        finally:
            del held
            graph.reset()
