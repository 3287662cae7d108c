"""One capture: begin it, call the model once, end it, and recover the process if it fails."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch

from pytest_cudagraph.backends.cuda.gpu import Gpu
from pytest_cudagraph.backends.cuda.refusals import diagnosis_of, refusal_of, text_of
from pytest_cudagraph.errors import CaptureRefusal, CudagraphError
from pytest_cudagraph.sources import user_site

_EMPTY_GRAPH = "The CUDA Graph is empty"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmptyGraph:
    """A graph before its capture."""

    graph: Any
    handle: Any
    """The memory pool of the graph."""
    is_shared: bool
    """Whether open graphs use that pool already."""
    keeps: bool
    """Whether the graph was made with ``keep_graph``. Torch instantiates such a graph only at its first launch."""
    generators: tuple[torch.Generator, ...] = ()


class _ErrorKeeper:
    """Calls the model and keeps its error: the end of an invalidated capture replaces that error by an echo."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self.error: BaseException | None = None
        self.was_called = False

    def __call__(self) -> Any:
        self.was_called = True
        try:
            return self._call()
        except BaseException as error:
            self.error = error
            raise


def record(gpu: Gpu, empty: EmptyGraph, call: Callable[[], Any]) -> Any:
    """Capture ``call`` into ``empty``. Return its output, at the captured addresses.

    Raises :class:`~pytest_cudagraph.errors.CaptureRefusal` for an error of torch or CUDA. The pool's handle must then
    not be used again. Interrupts, skips and this package's own errors come through unchanged.
    """
    keeper = _ErrorKeeper(call)
    try:
        output = _capture(gpu, empty, keeper)
        if empty.keeps:
            empty.graph.instantiate()
        gpu.synchronize()
        return output
    except BaseException as raised:
        recover(gpu, empty, has_begun=keeper.was_called)
        _translate(gpu, keeper.error or raised, call)


def _capture(gpu: Gpu, empty: EmptyGraph, call: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        # Torch only warns of a graph without nodes. Such a graph computes nothing, so it is refused here.
        warnings.filterwarnings("error", message=_EMPTY_GRAPH)
        with gpu.stream_capture(empty.graph, generators=empty.generators, pool=empty.handle):
            try:
                output = call()
                gpu.check_stayed()
                return output
            except BaseException:
                # A capture that failed early may be empty. Report its error, not the warning.
                warnings.filterwarnings("ignore", message=_EMPTY_GRAPH)
                raise


def _translate(gpu: Gpu, error: BaseException, call: Callable[[], Any]) -> NoReturn:
    if isinstance(error, CudagraphError) or not isinstance(error, Exception):
        raise error
    with gpu.cuda.stream(gpu.current_stream()):  # the call may leave another one current
        diagnosis = diagnosis_of(error, call, gpu.current_stream)
    raise refusal_of(error, diagnosis) from error


# Torch's host allocator keeps a pointer to a graph whose capture never ended, and cannot forget it.
# Such a graph must live as long as the process. One entry for each refused capture.
_NEVER_ENDED: list[Any] = []

# The second name is that of torch 2.6 and 2.7.
_END_ALLOCATION = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")
_RELEASE = ("_cuda_releasePool",)


def recover(gpu: Gpu, failed: EmptyGraph, *, has_begun: bool) -> None:
    """Drop a graph whose capture failed, whether or not CUDA ended that capture.

    ``has_begun``: the capture has taken a share in its pool. Sets ``gpu.broken`` if a test capture shows that this
    process cannot capture any more. Never raises: the error of the capture is the one to report.
    """
    if _attempt(failed.graph.pool) is None:  # torch returns the pool only after a capture that ended
        _attempt(failed.graph.reset)
        _attempt(gpu.synchronize)
        return
    was_underway = _attempt(_allocator_call(gpu, _END_ALLOCATION, failed.handle)) is None
    _attempt(failed.graph.reset)
    _NEVER_ENDED.append(failed.graph)
    _attempt(gpu.synchronize)  # reports, and thereby clears, a pending error
    # One release too many breaks the pool: later calls of empty_cache fail.
    if was_underway or (has_begun and not _reset_returns_share(gpu)):
        _attempt(_allocator_call(gpu, _RELEASE, failed.handle))
    problem = _attempt(lambda: _test_capture(gpu, failed.generators))
    if problem is not None:
        gpu.broken = text_of(problem)


_RETURNS_SHARE: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""By the module ``torch.cuda``, what :func:`_reset_returns_share` found."""


def _reset_returns_share(gpu: Gpu) -> bool:
    """Whether ``reset`` returns the share in the pool that a refused capture took. It depends on torch's version.

    The first call asks a refused capture into a pool of its own. True where that cannot tell.
    """
    if gpu.cuda not in _RETURNS_SHARE:
        handle = gpu.cuda.graph_pool_handle()
        keeps = _attempt(lambda: _refuse_into(gpu, handle)) is None and _is_held(gpu, handle)
        if keeps:
            _attempt(_allocator_call(gpu, _RELEASE, handle))
        _RETURNS_SHARE[gpu.cuda] = not keeps
    return _RETURNS_SHARE[gpu.cuda]


def _refuse_into(gpu: Gpu, handle: Any) -> None:
    graph = gpu.new_graph()
    with suppress(RuntimeError), gpu.stream_capture(graph, pool=handle):
        torch.zeros(1, device=gpu.device).item()
    _NEVER_ENDED.append(graph)
    graph.reset()
    gpu.synchronize()
    gpu.cuda.empty_cache()


def _is_held(gpu: Gpu, handle: Any) -> bool:
    try:
        segments = gpu.cuda.memory_snapshot()
    except RuntimeError:  # another allocator than torch's own
        return False
    return any(tuple(segment.get("segment_pool_id", ())) == tuple(handle) for segment in segments)


def _allocator_call(gpu: Gpu, names: tuple[str, ...], handle: Any) -> Callable[[], object]:
    memory = gpu.cuda.memory
    function = next((getattr(memory, name) for name in names if hasattr(memory, name)), None)
    if function is None:
        # Not every torch.cuda.memory imports the function. Its binding is older.
        function = next((getattr(torch._C, name) for name in names if hasattr(torch._C, name)), _absent)
    return lambda: function(gpu.index, handle)


def _absent(*_: Any) -> None:
    raise RuntimeError("this torch does not let an allocation to a pool be ended")


def _test_capture(gpu: Gpu, generators: Sequence[torch.Generator]) -> None:
    """Capture an addition, then draw a random number. A clean capture also ends the generators' capture mode."""
    gpu.synchronize()
    graph = gpu.new_graph()
    with gpu.running():
        number = torch.zeros(1, device=gpu.device)
        number.add_(1)  # loads the kernel before the capture
        with gpu.stream_capture(graph, generators=generators):
            number.add_(1)
    graph.reset()
    torch.rand(1, device=gpu.device)
    gpu.synchronize()


def _attempt(action: Callable[[], object]) -> Exception | None:
    """Run one step of the clean-up. Return its error, so that the next steps run too."""
    try:
        action()
    except Exception as error:
        return error
    return None


_TREES = "torch._inductor.cudagraph_trees"


@contextmanager
def no_graphs_inside() -> Iterator[None]:
    """Refuse calls of code that ``torch.compile`` runs with CUDA graphs, as ``mode="reduce-overhead"`` does.

    The first call of such code loads the class that is patched here, so its second call is refused. Raises
    :class:`~pytest_cudagraph.errors.CaptureRefusal` at the user's line. Other threads may go on.
    """
    manager = getattr(sys.modules.get(_TREES), "CUDAGraphTreeManager", None)
    if manager is None:
        yield
        return
    run = manager._run  # compiled code holds a bound ``run``, which looks ``_run`` up at every call
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
            hazard="nested-graph",
            site=user_site(),
            fix='compile without them: use the default mode or mode="max-autotune-no-cudagraphs", '
            "and turn torch._inductor.config.triton.cudagraphs off",
        )

    return refuse
