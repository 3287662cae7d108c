"""A recorded call that can be run again on new inputs."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

from pytest_cudagraph import pytree, sources
from pytest_cudagraph.backends.buffers import StaticInputs
from pytest_cudagraph.backends.cpu.lowering import Step
from pytest_cudagraph.backends.cpu.memory import BorrowedMemory, poison
from pytest_cudagraph.backends.cpu.tape import Tape
from pytest_cudagraph.errors import CudagraphError
from pytest_cudagraph.gc_pause import gc_paused
from pytest_cudagraph.values import Receipt, Site

# Compared by value without surprises; anything else goes the long way.
_PLAIN = (type(None), bool, int, str, torch.dtype)


class CpuInputs(StaticInputs):
    """Static inputs; small models would spend half a replay on flattening their arguments, hence the short way."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        super().__init__(args, kwargs)
        self._count, self._names = len(args), tuple(kwargs)
        values = [*self.args, *(self.kwargs[name] for name in self._names)]
        self._short = all(isinstance(value, torch.Tensor) or type(value) in _PLAIN for value in values)
        self._targets = [
            (i, v, v.shape, v.dtype, v.device) for i, v in enumerate(values) if isinstance(v, torch.Tensor)
        ]
        self._baked = [(i, v) for i, v in enumerate(values) if not isinstance(v, torch.Tensor)]

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The buffers in containers of their own: a model that takes items out of a dict finds them all next time."""
        args, kwargs = pytree.map_tensors(lambda tensor: tensor, (self.args, self.kwargs))
        return args, kwargs

    def load(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """As ``copy_in``, in inference mode only."""
        values = self._in_order(args, kwargs)
        if values is None or not self._fit(values):
            __tracebackhide__ = True
            self.copy_in(args, kwargs)  # which also has the words for what does not fit
            return
        for at, target, *_ in self._targets:
            target.copy_(values[at])

    def _in_order(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        if not self._short or len(args) != self._count or len(kwargs) != len(self._names):
            return None
        if not kwargs:
            return args
        if not all(name in kwargs for name in self._names):
            return None
        return (*args, *[kwargs[name] for name in self._names])

    def _fit(self, values: tuple[Any, ...]) -> bool:
        for at, _, shape, dtype, device in self._targets:
            given = values[at]
            if not isinstance(given, torch.Tensor):
                return False
            if given.shape != shape or given.dtype is not dtype or given.device != device:
                return False
        return all(type(values[at]) is type(baked) and values[at] == baked for at, baked in self._baked)


def operations_ns(steps: Iterable[Callable[[], object]]) -> float:
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


_MODULE_CALLS = frozenset({nn.Module._wrapped_call_impl.__code__, nn.Module._call_impl.__code__})


def run_watched(steps: Iterable[Step], opaque: frozenset[Step]) -> None:
    """Run the steps in order; :class:`~pytest_cudagraph.errors.CudagraphError` before a function of the model runs.

    Where a profiler holds the only hook that Python has for this, nothing is watched.
    """
    is_free = sys.getprofile() is None
    # What a collection calls, such as __del__, would seem to be called by the step it happens in.
    with gc_paused():
        for step in steps:
            if is_free and step not in opaque:
                _run_watched(step)
            else:
                step()


def _run_watched(step: Step) -> None:
    sys.setprofile(_spring)
    try:
        step()
    finally:
        sys.setprofile(None)


def _spring(frame: FrameType, event: str, arg: object) -> None:
    if event != "call":
        return
    code = frame.f_code
    if code in _MODULE_CALLS or sources.origin_of(code.co_filename) != "machinery":
        sys.setprofile(None)
        site = Site(file=code.co_filename, line=code.co_firstlineno, function=code.co_name)
        raise CudagraphError(
            f"a replay runs no Python of the model, and came to {site} in {code.co_name}: "
            "an operator of PyTorch was given a kernel in Python\n"
            "register the function as a custom operator (torch.library.custom_op), which is one step of the graph"
        )


_is_inference = torch.is_inference_mode_enabled
_is_autocast = torch._C._is_any_autocast_enabled


@dataclass(slots=True)
class LastReplayed:
    """Which graph of a pool has replayed last: its outputs, and no sibling's, hold an answer."""

    holder: CpuGraph | None = None


class CpuGraph:
    """One captured call; see :class:`~pytest_cudagraph.protocols.CapturedGraph`.

    Graphs of one pool share ``turn``. On CUDA they share memory, and whether a replay overwrites what a sibling
    answered is luck of the layout; here it always does.
    """

    def __init__(self, *, tape: Tape, turn: LastReplayed, inputs: CpuInputs, output: Any, receipt: Receipt) -> None:
        self._steps, self._opaque = tape.steps, tape.opaque
        self._outside: BorrowedMemory = tape.outside
        self._inputs: CpuInputs | None = inputs
        self._output = output
        self._owned = tape.ledger.made_among(pytree.tensors_in(output))
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
            return operations_ns(self._steps)

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
