"""Making the process fit for the next capture after one has failed. No GPU has run this yet.

Read in torch's sources (CUDAGraph.cpp, 2.6 to 2.13): ``capture_end`` of an invalidated capture raises before it tells
the caching allocator (until 2.12) and the random generators (until 2.12) that the capture is over. The next
``empty_cache`` then fails with ``captures_underway.empty() INTERNAL ASSERT FAILED``, the next random number with
``Offset increment outside graph capture``. Both are put right here, and a rehearsal shows whether that worked.
What cannot be put right: the allocator of pinned memory (2.10 to 2.12) takes the pool for one still being captured
into, for as long as the process lives. Its handle is therefore never used again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from pytest_cudagraph.backends.cuda.gpu import Gpu
from pytest_cudagraph.backends.cuda.refusals import text_of

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
