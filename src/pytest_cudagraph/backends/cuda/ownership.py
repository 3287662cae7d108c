"""Which outputs of a capture lie in the graph's own memory, and may therefore be overwritten."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pytest_cudagraph.backends.cuda.gpu import Gpu
from pytest_cudagraph.leaves import tensors_in


def own_outputs(gpu: Gpu, handle: Any, outputs: Any) -> list[torch.Tensor]:
    """The output tensors whose memory belongs to the pool ``handle``, each memory range once.

    An output that is an input, a parameter or any other tensor from outside does not, and must never be filled. The
    allocator is asked rather than the model, because a callable can hold tensors where nobody finds them. An
    allocator that does not tell (``cudaMallocAsync``, one of the user's own) leaves this empty.
    """
    ranges = _ranges(_segments(gpu), handle)
    seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
    owned = []
    for tensor in tensors_in(outputs):
        if not _is_strided(tensor):
            continue
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and key not in seen and any(low <= key[0] < high for low, high in ranges):
            seen.add(key)
            owned.append(tensor)
    return owned


def _is_strided(tensor: torch.Tensor) -> bool:
    # Sparse and nested tensors lie in several tensors; a wrapper subclass in none.
    return tensor.layout is torch.strided and not tensor.is_nested and not is_traceable_wrapper_subclass(tensor)


def pool_bytes(gpu: Gpu, handle: Any) -> int | None:
    """What the pool ``handle`` holds of the device; None from an allocator that does not tell."""
    segments = _segments(gpu)
    return None if segments is None else sum(high - low for low, high in _ranges(segments, handle))


def reserved_bytes(gpu: Gpu) -> int | None:
    """What the allocator holds of the device in all; None from one that keeps no statistics."""
    try:
        return int(gpu.cuda.memory_reserved(gpu.index))
    except RuntimeError:
        return None


def _segments(gpu: Gpu) -> Sequence[Mapping[str, Any]] | None:
    """The memory that torch's own allocator holds; None where another one is in its place, which raises."""
    try:
        segments: Sequence[Mapping[str, Any]] = gpu.cuda.memory_snapshot()
    except RuntimeError:
        return None
    return segments


def _ranges(segments: Sequence[Mapping[str, Any]] | None, handle: Any) -> list[tuple[int, int]]:
    return [
        (segment["address"], segment["address"] + segment["total_size"])
        for segment in segments or ()
        if tuple(segment.get("segment_pool_id", ())) == tuple(handle)
    ]
