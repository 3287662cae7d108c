"""One GPU as the modules of this backend share it: torch.cuda, the capture stream, and random generators."""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch


def capture_error_mode() -> str:
    """``thread_local`` while other threads may use CUDA, else ``global``, CUDA's strictest mode.

    In the global mode a harmless call of another thread (a logger, a data loader) invalidates the capture. Threads
    that ``threading`` did not start count too, and so do the C++ watchdogs of ``torch.distributed``.
    """
    others = threading.active_count() > 1 or len(sys._current_frames()) > 1
    return "thread_local" if others or _is_distributed() else "global"


def _is_distributed() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()


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

    def check_stayed(self) -> None:
        """Raise torch's error if the call ends on another stream: no graph holds the work launched there."""
        if self.current_stream() != self.stream:
            raise RuntimeError(ENDS_ELSEWHERE)

    def current_stream(self) -> Any:
        """The current stream of this thread."""
        return self.cuda.current_stream(self.index)

    def synchronize(self) -> None:
        """Wait for all work of this GPU. Raises the error of earlier work."""
        with self.capture_lock:
            self.cuda.synchronize(self.index)


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


_LEAVES = (type, ModuleType, torch.Tensor, str, bytes, int, float, complex, bool, type(None))


def generators_of(device: str, *roots: Any, limit: int = 100_000) -> list[torch.Generator]:
    """The ``torch.Generator`` objects of one device that are reachable from ``roots``, each once.

    Follows attributes, containers, closures, bound methods, partials, and the globals that a function names. Visits
    at most ``limit`` objects, so that a model is searched and a whole program is not.
    """
    wanted = torch.device(device)
    found: dict[int, torch.Generator] = {}
    seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is used again
    waiting = list(roots)
    while waiting and len(seen) < limit:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, _LEAVES):
            continue
        seen[id(value)] = value
        if not isinstance(value, torch.Generator):
            waiting.extend(_held_by(value))
        # torch.Generator("cuda") has no index. It draws on whichever GPU is current.
        elif value.device.type == wanted.type and value.device.index in (None, wanted.index):
            found[id(value)] = value
    return list(found.values())


@contextmanager
def states_kept(generators: Iterable[torch.Generator]) -> Iterator[None]:
    """Restore the states of the generators after the block, which draws from them."""
    states = [(generator, generator.get_state()) for generator in generators]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def _held_by(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return list(dict.values(value))
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    return _held_by_function(value) if isinstance(value, FunctionType) else _attributes(value)


def _held_by_function(function: FunctionType) -> list[Any]:
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    # Other globals than generators and modules would lead through the whole program.
    named = (function.__globals__.get(name) for name in function.__code__.co_names)
    return [*cells, *(function.__defaults__ or ()), *(value for value in named if _is_part(value))]


def _attributes(value: Any) -> list[Any]:
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return []
    return list(held.values()) if isinstance(held, dict) else []


def _is_part(value: Any) -> bool:
    return isinstance(value, torch.Generator | torch.nn.Module)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a variable that is not bound yet
        return False
