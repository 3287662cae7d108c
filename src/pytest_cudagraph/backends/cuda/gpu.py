"""One GPU as the modules of this backend share it: torch.cuda and the capture stream."""

from __future__ import annotations

import gc
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch

from pytest_cudagraph.units import plural


def capture_error_mode() -> str:
    """``thread_local`` while other threads may use CUDA, else ``global``, CUDA's strictest mode.

    In the global mode a harmless call of another thread (a logger, a data loader) invalidates the capture. Threads
    that ``threading`` did not start count too, and so do the C++ watchdogs of ``torch.distributed``.
    """
    others = threading.active_count() > 1 or len(sys._current_frames()) > 1
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return "thread_local" if others or is_distributed else "global"


ENDS_ELSEWHERE = "Capture must end on the same stream it began on."
"""Torch's text."""


class Gpu:
    """One GPU. ``cuda`` is the module ``torch.cuda``, or a test's fake.

    Warm-up and captures share one stream: libraries keep a workspace per stream, and only graphs captured on the same
    stream share pool memory.
    """

    capture_lock: Any = threading.RLock()
    """Held during a capture, and while a thread waits for a whole device.

    Torch captures one graph at a time in a process. CUDA invalidates a capture if another thread waits for its device.
    """

    def __init__(self, cuda: Any, index: int, device: str) -> None:
        self.cuda = cuda
        self.index = index
        self.device = device
        self.stream: Any = cuda.Stream(device=index)
        self.broken = ""
        """Why this process cannot capture any more, empty while it can."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inference mode, with this GPU as the current one."""
        with torch.inference_mode(), self.cuda.device(self.index):
            yield

    @contextmanager
    def on_capture_stream(self) -> Iterator[None]:
        """Make the capture stream current: it waits for the caller's stream, which waits for it afterwards."""
        caller = self.current_stream()
        self.stream.wait_stream(caller)
        try:
            with self.cuda.stream(self.stream):
                yield
        finally:
            caller.wait_stream(self.stream)

    @contextmanager
    def stream_capture(self, graph: Any, *, generators: Sequence[torch.Generator] = (), **pool: Any) -> Iterator[None]:
        """``torch.cuda.graph`` on the capture stream, with the body in inference mode.

        The capture begins and ends outside inference mode: torch then makes the tensors for the random seeds of
        replays, and must be able to write to them at every launch, in any mode.
        """
        begin = self.cuda.graph(graph, stream=self.stream, capture_error_mode=capture_error_mode(), **pool)
        with torch.inference_mode(False), own_workspaces():
            register(graph, generators)
            # The outer stream context restores the caller's stream, also where torch.cuda.graph does not.
            # The inner one restores the capture stream if the body changed it, or torch would not end the capture.
            with self.on_capture_stream(), begin, self.cuda.stream(self.stream), torch.inference_mode():
                yield

    def new_graph(self, **options: bool) -> Any:
        """A graph that holds nothing yet."""
        graph = self.cuda.CUDAGraph(**options)
        _MADE.add(graph)
        return graph

    def check_stayed(self) -> None:
        """Raise torch's error if the call ends on another stream: no graph holds the work launched there."""
        if self.current_stream() != self.stream:
            raise RuntimeError(ENDS_ELSEWHERE)

    def current_stream(self) -> Any:
        """The current stream of this thread."""
        return self.cuda.current_stream(self.index)

    def is_current(self, stream: Any) -> bool:
        """Whether a stream is the current one of this thread. Takes a tenth of the time of :meth:`current_stream`."""
        if self.cuda is not torch.cuda:
            return bool(stream == self.current_stream())
        return bool(stream.cuda_stream == torch._C._cuda_getCurrentRawStream(self.index))

    def synchronize(self) -> None:
        """Wait for all work of this GPU. Raises the error of earlier work."""
        with self.capture_lock:
            self.cuda.synchronize(self.index)


_MADE: WeakSet[Any] = WeakSet()
"""The graphs of this package."""


def warn_of_other_graphs(cuda: Any) -> None:
    """Warn of live graphs that somebody else captured: a capture frees the cuBLAS workspaces of the whole process."""
    # By its type: to ask an object for its class may run code of it.
    graphs = [each for each in gc.get_objects() if issubclass(type(each), cuda.CUDAGraph)]
    others = sum(graph not in _MADE and _is_captured(graph) for graph in graphs)
    if others:
        warnings.warn(
            f"{plural(others, 'CUDA graph')} of your program: captures of pytest-cudagraph free the cuBLAS workspaces "
            "of the process, which these graphs may use by address. Do not replay them afterwards: capture them again, "
            "or release them (del) before",
            stacklevel=2,
        )


def _is_captured(graph: Any) -> bool:
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


@contextmanager
def own_workspaces() -> Iterator[None]:
    """Let cuBLAS take new workspaces from the graph's own pool, and forget them after the capture.

    A graph uses its workspace by address. cuBLAS keeps its workspaces between calls, shared by all graphs of a stream.
    Torch 2.12 and later frees them with any released graph, and so do graph trees. An open graph would then write to
    freed memory.
    """
    # Not there in a torch without CUDA.
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
    clear()
    try:
        yield
    finally:
        clear()


def register(graph: Any, generators: Sequence[torch.Generator]) -> None:
    """Let replays of ``graph`` use ``generators`` too. Torch registers the default one itself."""
    if not generators or not hasattr(graph, "register_generator_state"):
        return
    with warnings.catch_warnings():
        # Later versions of torch find the generators themselves and deprecate this call.
        warnings.simplefilter("ignore")
        for generator in generators:
            graph.register_generator_state(generator)
