"""Making the process fit for the next capture after one has failed. No GPU has run this yet.

Read in torch's sources (CUDAGraph.cpp, 2.6 to 2.13): ``capture_end`` of an invalidated capture raises before it tells
the caching allocator, and in older versions the default generator, that the capture is over. The next
``empty_cache`` then fails with ``captures_underway.empty() INTERNAL ASSERT FAILED``, the next random number with
``Offset increment outside graph capture``. Both are put right here, and a rehearsal shows whether that worked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pytest_cudagraph.backends.cuda.gpu import Gpu
from pytest_cudagraph.backends.cuda.refusals import text_of

# Torch's host allocator keeps a pointer to a graph whose capture never ended and offers no way to take it back:
# such a graph must live as long as the process. One entry for each refused capture.
_NEVER_ENDED: list[Any] = []

# The second name is that of torch 2.6 and 2.7.
_END_ALLOCATION = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")
_RELEASE = ("_cuda_releasePool",)


def recover(gpu: Gpu, graph: Any, handle: Any, *, has_ended: bool) -> None:
    """Drop ``graph`` after its capture failed; ``has_ended`` tells whether CUDA could end the capture.

    Sets ``gpu.broken`` when the rehearsal shows that this process cannot capture any more. Never raises: the failure
    of the capture is the error to report.
    """
    if has_ended:
        _attempt(graph.reset)
        _attempt(gpu.synchronize)
        return
    if _attempt(_allocator_call(gpu, _END_ALLOCATION, handle)) is None:
        # capture_begin took a share in the pool which only a capture that ended gives back.
        _attempt(_allocator_call(gpu, _RELEASE, handle))
    _attempt(graph.reset)
    _NEVER_ENDED.append(graph)
    _attempt(gpu.synchronize)  # reports, and thereby clears, an error still pending
    problem = _attempt(lambda: _rehearse(gpu))
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


def _rehearse(gpu: Gpu) -> None:
    """Capture one addition and draw one random number; a clean capture also takes the generator out of capture mode."""
    gpu.synchronize()
    graph = gpu.cuda.CUDAGraph()
    with gpu.running():
        number = torch.zeros(1, device=gpu.device)
        number.add_(1)  # so that its kernel is loaded before the capture
        with gpu.capturing(graph):
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
