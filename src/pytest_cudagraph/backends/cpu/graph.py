"""A recorded call that can be run again on new inputs."""

from __future__ import annotations

from typing import Any

import torch

from pytest_cudagraph.backends.cpu.intake import CpuInputs
from pytest_cudagraph.backends.cpu.lowering import Step
from pytest_cudagraph.backends.cpu.storages import poison
from pytest_cudagraph.errors import CudagraphError
from pytest_cudagraph.values import Receipt

_is_inference = torch.is_inference_mode_enabled
_is_autocast = torch._C._is_any_autocast_enabled


class CpuGraph:
    """One captured call; see :class:`~pytest_cudagraph.protocols.CapturedGraph`."""

    def __init__(
        self, *, steps: tuple[Step, ...], inputs: CpuInputs, output: Any, owned: list[torch.Tensor], receipt: Receipt
    ) -> None:
        self._steps: tuple[Step, ...] = steps
        self._inputs: CpuInputs | None = inputs
        self._output = output
        self._owned = owned
        self._receipt = receipt
        self._replays = 0

    @property
    def receipt(self) -> Receipt:
        return self._receipt

    @property
    def replays(self) -> int:
        return self._replays

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Copy the arguments in, replay, return the captured output, which the next replay overwrites."""
        inputs = self._open_inputs()
        # As captured: inference mode, and no autocast of a caller, which the capture has not seen.
        if _is_inference() and not _is_autocast():
            inputs.load(args, kwargs)
            return self._run()
        with torch._C._InferenceMode(True), torch._C._DisableAutocast():
            inputs.load(args, kwargs)
            return self._run()

    def replay(self) -> Any:
        """Run on what the static inputs hold now."""
        self._open_inputs()
        with torch._C._InferenceMode(True), torch._C._DisableAutocast():
            return self._run()

    def poison(self) -> None:
        """Fill what the graph made for its outputs; an output that is an input or a parameter is not its own."""
        with torch.inference_mode():
            for tensor in self._owned:
                poison(tensor)

    def close(self) -> None:
        """Release buffers, steps and output."""
        self._steps, self._inputs, self._output, self._owned = (), None, None, []

    def _open_inputs(self) -> CpuInputs:
        if self._inputs is None:
            size = self._receipt.batch_size
            raise CudagraphError(f"the graph of batch size {size} is closed; capture it again to replay it")
        return self._inputs

    def _run(self) -> Any:
        for step in self._steps:
            step()
        self._replays += 1
        return self._output
