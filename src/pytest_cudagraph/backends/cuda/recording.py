"""One capture: begin, run the model once, end, and come out clean whichever of them fails."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch

from pytest_cudagraph.backends.cuda.gpu import Gpu
from pytest_cudagraph.backends.cuda.refusals import diagnose, is_unspecific, refusal_of, text_of
from pytest_cudagraph.errors import CaptureRefusal, CudagraphError
from pytest_cudagraph.sources import user_site

# Torch's host allocator keeps a pointer to a graph whose capture never ended and offers no way to take it back:
# such a graph must live as long as the process. One entry for each refused capture.
_NEVER_ENDED: list[Any] = []

# The second name is that of torch 2.6 and 2.7.
_END_ALLOCATION = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")
_RELEASE = ("_cuda_releasePool",)


class Failed(Protocol):
    """A graph whose capture failed, as :class:`~pytest_cudagraph.backends.cuda.recording.Blank` has it."""

    @property
    def graph(self) -> Any: ...

    @property
    def handle(self) -> Any: ...

    @property
    def is_shared(self) -> bool: ...

    @property
    def generators(self) -> Sequence[torch.Generator]: ...


def recover(gpu: Gpu, failed: Failed) -> None:
    """Drop a graph after its capture failed, whether CUDA could end the capture (as after an error in Python) or not.

    Sets ``gpu.broken`` when the rehearsal shows that this process cannot capture any more. Never raises: the failure
    of the capture is the error to report.
    """
    if _attempt(failed.graph.pool) is None:  # torch tells the pool of a capture that has ended only
        _attempt(failed.graph.reset)
        _attempt(gpu.synchronize)
        return
    was_underway = _attempt(_allocator_call(gpu, _END_ALLOCATION, failed.handle)) is None
    _attempt(failed.graph.reset)
    # capture_begin took a share in the pool which most versions give back only for a capture that ended. Later ones
    # give it back in reset: of a pool that nobody else uses a second time is refused, of another it would be theft.
    if was_underway or not failed.is_shared:
        _attempt(_allocator_call(gpu, _RELEASE, failed.handle))
    _NEVER_ENDED.append(failed.graph)
    _attempt(gpu.synchronize)  # reports, and thereby clears, an error still pending
    problem = _attempt(lambda: _rehearse(gpu, failed.generators))
    if problem is not None:
        gpu.broken = text_of(problem)


def _allocator_call(gpu: Gpu, names: tuple[str, ...], handle: Any) -> Callable[[], object]:
    memory = gpu.cuda.memory
    function = next((getattr(memory, name) for name in names if hasattr(memory, name)), None)
    if function is None:
        # Versions differ in what torch.cuda.memory imports; the binding itself is older.
        function = next((getattr(torch._C, name) for name in names if hasattr(torch._C, name)), _absent)
    return lambda: function(gpu.index, handle)


def _absent(*_: Any) -> None:
    raise RuntimeError("this torch does not let an allocation to a pool be ended")


def _rehearse(gpu: Gpu, generators: Sequence[torch.Generator]) -> None:
    """Capture an addition, draw a random number; a clean capture also takes the generators out of capture mode."""
    gpu.synchronize()
    graph = gpu.cuda.CUDAGraph()
    with gpu.running():
        number = torch.zeros(1, device=gpu.device)
        number.add_(1)  # so that its kernel is loaded before the capture
        with gpu.capturing(graph, generators=generators):
            number.add_(1)
    graph.reset()
    torch.rand(1, device=gpu.device)
    gpu.synchronize()


def _attempt(action: Callable[[], object]) -> Exception | None:
    """The error of one clean-up step, so that the next steps run whatever it is."""
    try:
        action()
    except Exception as error:
        return error
    return None


_TREES = "torch._inductor.cudagraph_trees"


@contextmanager
def no_graphs_inside() -> Iterator[None]:
    """Refuse a call of code that ``torch.compile`` has given graphs of its own, as ``mode="reduce-overhead"`` does.

    It is the call that is refused, whatever turned its graphs on: a mode, an option, a setting. The very first call
    of such code loads what is watched here; its second call is refused. Raises
    :class:`~pytest_cudagraph.errors.CaptureRefusal` from within, at the user's line. Other threads are let through.
    """
    manager = getattr(sys.modules.get(_TREES), "CUDAGraphTreeManager", None)
    if manager is None:
        yield
        return
    run = manager._run  # compiled code has bound run itself, which looks this one up at every call
    manager._run = _refusing(run, threading.get_ident())
    try:
        yield
    finally:
        manager._run = run


def _refusing(run: Callable[..., Any], here: int) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != here:
            return run(self, *args, **kwargs)
        raise CaptureRefusal(
            "compiled code inside the call runs CUDA graphs of its own",
            site=user_site(),
            fix='compile without them: the default mode, or mode="max-autotune-no-cudagraphs"; '
            "and leave torch._inductor.config.triton.cudagraphs off",
        )

    return refuse


_EMPTY_GRAPH = "The CUDA Graph is empty"


class _Watched:
    """Calls the model and keeps its error, which the end of an invalidated capture would replace by an echo."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self.error: BaseException | None = None

    def __call__(self) -> Any:
        try:
            return self._call()
        except BaseException as error:
            self.error = error
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class EmptyGraph:
    """A graph to be captured into, and what its capture needs."""

    graph: Any
    handle: Any
    """The pool its memory comes from."""
    is_shared: bool
    """Whether open graphs use that pool already."""
    keeps: bool
    """Whether it was made with ``keep_graph``: torch would leave its instantiation to the first launch."""
    generators: tuple[torch.Generator, ...] = ()


def record(gpu: Gpu, blank: EmptyGraph, call: Callable[[], Any]) -> Any:
    """Capture ``call``; what it returned, at captured addresses.

    Raises :class:`~pytest_cudagraph.errors.CaptureRefusal` for what torch and CUDA refuse; the pool's handle must then
    not be used for another capture. What is no ``Exception`` (an interrupt, a skip) and our own errors come through
    as they are.
    """
    watched = _Watched(call)
    try:
        outputs = _capture(gpu, blank, watched)
        if blank.keeps:
            blank.graph.instantiate()
        gpu.synchronize()
        return outputs
    except BaseException as raised:
        recover(gpu, blank)
        _translate(gpu, watched.error or raised, call)


def _capture(gpu: Gpu, blank: EmptyGraph, call: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        # A graph without a node does nothing: torch warns of it, here it is refused in torch's words.
        warnings.filterwarnings("error", message=_EMPTY_GRAPH)
        with gpu.capturing(blank.graph, generators=blank.generators, pool=blank.handle):
            try:
                outputs = call()
                gpu.check_stayed()
                return outputs
            except BaseException:
                # A capture cut short may well be empty; that must not become the error.
                warnings.filterwarnings("ignore", message=_EMPTY_GRAPH)
                raise


def _translate(gpu: Gpu, error: BaseException, call: Callable[[], Any]) -> NoReturn:
    if isinstance(error, CudagraphError) or not isinstance(error, Exception):
        raise error
    with gpu.cuda.stream(gpu.current_stream()):  # the call may leave another one current
        diagnosis = diagnose(call, gpu.current_stream) if is_unspecific(error) else None
    raise refusal_of(error, diagnosis) from error
