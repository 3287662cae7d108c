"""One GPU as the rooms of this backend share it: the seam to ``torch.cuda``, the capture stream."""

from __future__ import annotations

import gc
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from pytest_cudagraph.gc_pause import gc_paused


@contextmanager
def quiet_gc() -> Iterator[None]:
    """Collect now, then keep everything alive out of reach of the collector until the block ends.

    A collection in the middle of a capture may destroy another graph or an event, which CUDA refuses while capturing.
    """
    gc.collect()
    if gc.get_freeze_count():
        # Someone else has frozen the heap (a server before it forks); unfreezing would undo that too.
        with gc_paused():
            yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def capture_error_mode() -> str:
    """``thread_local`` while other threads live that may use CUDA, else ``global``, CUDA's strictest.

    In the global mode a harmless call of another thread (a logger, a data loader) invalidates the capture. Threads
    that Python's ``threading`` did not start are counted too, and the watchdogs of ``torch.distributed``, in C++.
    """
    others = threading.active_count() > 1 or len(sys._current_frames()) > 1
    return "thread_local" if others or _is_distributed() else "global"


def _is_distributed() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()


_CAPTURES = threading.RLock()

ENDS_ELSEWHERE = "Capture must end on the same stream it began on."
"""Torch's own words."""


class Gpu:
    """``cuda`` is the module ``torch.cuda``, or what a test puts in its place.

    Warm-up and every capture of a process share one stream: libraries keep a workspace per stream, and graphs share
    pool memory only if they were captured on the same one.
    """

    def __init__(self, cuda: Any, index: int, device: str) -> None:
        self.cuda = cuda
        self.index = index
        self.device = device
        self.stream: Any = cuda.Stream(device=index)
        self.broken = ""
        """Why no capture can succeed in this process any more; empty while it can."""
        self.captures: Any = _CAPTURES
        """Held by whoever captures, or waits for a whole device: of any two threads in the process, one at a time.

        Torch can capture one graph at a time, and CUDA spoils the capture of a device that another thread waits for.
        """

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inference mode, with this GPU as the current one."""
        with torch.inference_mode(), self.cuda.device(self.index):
            yield

    @contextmanager
    def on_capture_stream(self) -> Iterator[None]:
        """The capture stream as the current one, ordered after the caller's stream, and the caller's after it."""
        caller = self.current_stream()
        self.stream.wait_stream(caller)
        try:
            with self.cuda.stream(self.stream):
                yield
        finally:
            caller.wait_stream(self.stream)

    @contextmanager
    def capturing(self, graph: Any, *, generators: Sequence[torch.Generator] = (), **pool: Any) -> Iterator[None]:
        """``torch.cuda.graph`` on the capture stream, with the body in inference mode.

        The capture begins and ends outside inference mode: torch then makes the tensors through which replays seed
        their random numbers, and writes to them at every launch, in whatever mode that is.
        """
        begin = self.cuda.graph(graph, stream=self.stream, capture_error_mode=capture_error_mode(), **pool)
        with torch.inference_mode(False), own_workspaces():
            register(graph, generators)
            # The outer stream context gives back the caller's stream even where torch.cuda.graph fails to.
            # The inner one is for a body that leaves another stream current: there torch would not end the capture.
            with self.on_capture_stream(), begin, self.cuda.stream(self.stream), torch.inference_mode():
                yield

    def check_stayed(self) -> None:
        """Raise as torch does where a captured call ends on another stream: what it launched there is in no graph."""
        if self.current_stream() != self.stream:
            raise RuntimeError(ENDS_ELSEWHERE)

    def current_stream(self) -> Any:
        """The stream on which this thread launches now."""
        return self.cuda.current_stream(self.index)

    def synchronize(self) -> None:
        """Wait for all work of this GPU; raises what earlier work has failed with."""
        with self.captures:
            self.cuda.synchronize(self.index)


@contextmanager
def own_workspaces() -> Iterator[None]:
    """Let cuBLAS take the workspaces of a capture from the graph's own pool, and forget them afterwards.

    A graph reads its workspace by address. Those that cuBLAS keeps between calls, for all graphs of a stream together,
    are given up whenever torch (2.12 and later, with any graph that is released) or a graph tree says so, and a graph
    still open would write to memory that is no longer its own. Kept for good, one of a pool would hold the pool.
    """
    clear_workspaces()
    try:
        yield
    finally:
        clear_workspaces()


def clear_workspaces() -> None:
    """Free the workspaces of cuBLAS on this thread; the next multiplication takes new ones."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:  # not there in a torch without CUDA
        clear()


def register(graph: Any, generators: Sequence[torch.Generator]) -> None:
    """Let replays of ``graph`` draw from ``generators`` too; torch knows of the default one itself."""
    if not generators or not hasattr(graph, "register_generator_state"):
        return
    with warnings.catch_warnings():
        # Later versions of torch find the generators by themselves and deprecate the call.
        warnings.simplefilter("ignore")
        for generator in generators:
            graph.register_generator_state(generator)
