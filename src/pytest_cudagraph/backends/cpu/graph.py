"""A recorded call that runs again on new inputs."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

from pytest_cudagraph import pytree, sources
from pytest_cudagraph.backends.buffers import BufferedGraph, StaticInputs
from pytest_cudagraph.backends.cpu.lowering import Step
from pytest_cudagraph.backends.cpu.memory import poison
from pytest_cudagraph.backends.cpu.tape import Tape
from pytest_cudagraph.errors import CudagraphError
from pytest_cudagraph.gc_pause import gc_paused
from pytest_cudagraph.values import Receipt, Site


@dataclass(slots=True)
class LastReplayed:
    """The graph of a pool that replayed last. Only its outputs are valid."""

    graph: CpuGraph | None = None


_is_inference = torch.is_inference_mode_enabled
_is_autocast = torch._C._is_any_autocast_enabled


class CpuGraph(BufferedGraph):
    """One captured call. See :class:`~pytest_cudagraph.protocols.CapturedGraph`.

    On CUDA the graphs of one pool share memory: a replay may overwrite the outputs of another graph, depending on the
    layout. Here a replay always overwrites the outputs of the graph that replayed last.
    """

    def __init__(self, *, tape: Tape, last: LastReplayed, inputs: StaticInputs, output: Any, receipt: Receipt) -> None:
        super().__init__(inputs, output, receipt)
        self._steps, self._opaque = tape.steps, tape.opaque
        self._borrowed = tape.borrowed
        self._owned = tape.storages.made_among(pytree.tensors_in(output))
        self._last = last
        self._is_verified = False

    def replay(self) -> Any:
        """Run on the values that the static inputs hold now."""
        if self._inputs is None:
            raise self._closed_error()
        # As at capture: inference mode, and no autocast, which the caller may have turned on since.
        if _is_inference() and not _is_autocast():
            return self._run()
        with torch._C._InferenceMode(True), torch._C._DisableAutocast():
            return self._run()

    def busy_ns(self) -> float:
        """The sum of the times of all operations, in ns. Each is timed by itself, in an extra replay."""
        if self._inputs is None:
            raise self._closed_error()
        with torch._C._InferenceMode(True), torch._C._DisableAutocast():
            return operations_ns(self._steps)

    def poison(self) -> None:
        """Fill the outputs in the graph's own memory, but not those that are inputs or parameters.

        The next replay fails if it runs Python code of the model.
        """
        self._is_verified = False
        self._fill_outputs()

    def close(self) -> None:
        """Release buffers, steps and output."""
        self._steps, self._inputs, self._output, self._owned = (), None, None, []
        if self._last.graph is self:
            self._last.graph = None

    def _fill_outputs(self) -> None:
        with torch.inference_mode():
            for tensor in self._owned:
                poison(tensor)

    def _run(self) -> Any:
        if self._borrowed.is_stale():
            raise self._borrowed.error(self._receipt.batch_size)
        if self._last.graph is not self or not self._is_verified:
            self._run_checked()
        else:
            for step in self._steps:
                step()
        self._replays += 1
        return self._output

    def _run_checked(self) -> None:
        """The first replay after another graph's replay, or after the outputs were poisoned."""
        if self._borrowed.has_moved():
            raise self._borrowed.error(self._receipt.batch_size)
        last, self._last.graph = self._last.graph, self
        if last is not None and last is not self:
            last._fill_outputs()
        run_watched(self._steps, frozenset(self._steps) if self._is_verified else self._opaque)
        self._is_verified = True


def operations_ns(steps: Iterable[Callable[[], object]]) -> float:
    """The sum of the times of all steps, in ns, without the cost of reading the clock."""
    now_ns = time.perf_counter_ns
    readings_ns = [now_ns() for _ in range(32)]
    reading_ns = min(later - earlier for earlier, later in itertools.pairwise(readings_ns))
    total_ns = 0.0
    for step in steps:
        start_ns = now_ns()
        step()
        total_ns += max(now_ns() - start_ns - reading_ns, 0)
    return total_ns


_MODULE_CALLS = frozenset({nn.Module._wrapped_call_impl.__code__, nn.Module._call_impl.__code__})


def run_watched(steps: Iterable[Step], opaque: frozenset[Step]) -> None:
    """Run the steps in order. Raise :class:`~pytest_cudagraph.errors.CudagraphError` before code of the model runs.

    Needs Python's profiling hook. Where a profiler holds that hook, the steps run unwatched.
    """
    is_free = sys.getprofile() is None
    # A garbage collection may call Python code such as __del__, which is not the step's own.
    with gc_paused():
        for step in steps:
            if is_free and step not in opaque:
                _run_watched(step)
            else:
                step()


def _run_watched(step: Step) -> None:
    sys.setprofile(_raise_for_model_code)
    try:
        step()
    finally:
        sys.setprofile(None)


def _raise_for_model_code(frame: FrameType, event: str, arg: object) -> None:
    if event != "call":
        return
    code = frame.f_code
    if code in _MODULE_CALLS or sources.origin_of(code.co_filename) != "machinery":
        sys.setprofile(None)
        site = Site(file=code.co_filename, line=code.co_firstlineno, function=code.co_name)
        raise CudagraphError(
            f"a replay must not run Python code of the model; this one called {code.co_name} at {site}: "
            "a PyTorch operator has a kernel written in Python\n"
            "register the function as a custom operator (torch.library.custom_op), which is one step of the graph"
        )
