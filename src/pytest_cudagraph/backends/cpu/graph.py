"""A recorded call that can be run again on new inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pytest_cudagraph import leaves
from pytest_cudagraph.backends.cpu.busy import time_alone_ns
from pytest_cudagraph.backends.cpu.intake import CpuInputs
from pytest_cudagraph.backends.cpu.outside import Outside
from pytest_cudagraph.backends.cpu.storages import poison
from pytest_cudagraph.backends.cpu.tape import Tape
from pytest_cudagraph.backends.cpu.trap import run_watched
from pytest_cudagraph.errors import CudagraphError
from pytest_cudagraph.values import Receipt

_is_inference = torch.is_inference_mode_enabled
_is_autocast = torch._C._is_any_autocast_enabled


@dataclass(slots=True)
class Turn:
    """Which graph of a pool has replayed last: its outputs, and no sibling's, hold an answer."""

    holder: CpuGraph | None = None


class CpuGraph:
    """One captured call; see :class:`~pytest_cudagraph.protocols.CapturedGraph`.

    Graphs of one pool share ``turn``. On CUDA they share memory, and whether a replay overwrites what a sibling
    answered is luck of the layout; here it always does.
    """

    def __init__(self, *, tape: Tape, turn: Turn, inputs: CpuInputs, output: Any, receipt: Receipt) -> None:
        self._steps, self._opaque = tape.steps, tape.opaque
        self._outside: Outside = tape.outside
        self._inputs: CpuInputs | None = inputs
        self._output = output
        self._owned = tape.ledger.made_among(leaves.tensors_in(output))
        self._turn = turn
        self._is_proved = False
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
        __tracebackhide__ = True
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

    def busy_ns(self) -> float:
        """What the operations of one replay take by themselves, timed one by one in a replay of their own."""
        self._open_inputs()
        with torch._C._InferenceMode(True), torch._C._DisableAutocast():
            return time_alone_ns(self._steps)

    def poison(self) -> None:
        """Fill what the graph made for its outputs; an output that is an input or a parameter is not its own.

        The next replay is a proof, and is watched for Python of the model.
        """
        self._is_proved = False
        self._spoil()

    def close(self) -> None:
        """Release buffers, steps and output."""
        self._steps, self._inputs, self._output, self._owned = (), None, None, []
        if self._turn.holder is self:
            self._turn.holder = None

    def _spoil(self) -> None:
        with torch.inference_mode():
            for tensor in self._owned:
                poison(tensor)

    def _open_inputs(self) -> CpuInputs:
        if self._inputs is None:
            size = self._receipt.batch_size
            raise CudagraphError(f"the graph of batch size {size} is closed; capture it again to replay it")
        return self._inputs

    def _run(self) -> Any:
        if self._outside.is_stale():
            raise self._outside.error(self._receipt.batch_size)
        if self._turn.holder is not self or not self._is_proved:
            self._begin()
        else:
            for step in self._steps:
                step()
        self._replays += 1
        return self._output

    def _begin(self) -> None:
        """The first replay after a sibling's, or after the outputs were poisoned."""
        if self._outside.has_moved():
            raise self._outside.error(self._receipt.batch_size)
        last, self._turn.holder = self._turn.holder, self
        if last is not None and last is not self:
            last._spoil()
        run_watched(self._steps, frozenset(self._steps) if self._is_proved else self._opaque)
        self._is_proved = True
