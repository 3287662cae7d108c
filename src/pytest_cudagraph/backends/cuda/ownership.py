"""Which outputs of a capture lie in the graph's own memory, and may therefore be overwritten."""

from __future__ import annotations

from typing import Any

import torch

from pytest_cudagraph.backends.cuda.gpu import Gpu
from pytest_cudagraph.leaves import tensors_in


def own_outputs(gpu: Gpu, handle: Any, outputs: Any) -> list[torch.Tensor]:
    """The output tensors whose memory belongs to the pool ``handle``, each memory range once.

    An output that is an input, a parameter or any other tensor from outside does not, and must never be filled. The
    allocator is asked rather than the model, because a callable can hold tensors where nobody finds them. An
    allocator that does not tell (``cudaMallocAsync``) leaves this empty.
    """
    ranges = _pool_ranges(gpu, handle)
    seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
    owned = []
    for tensor in tensors_in(outputs):
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and key not in seen and any(low <= key[0] < high for low, high in ranges):
            seen.add(key)
            owned.append(tensor)
    return owned


def _pool_ranges(gpu: Gpu, handle: Any) -> list[tuple[int, int]]:
    return [
        (segment["address"], segment["address"] + segment["total_size"])
        for segment in gpu.cuda.memory_snapshot()
        if tuple(segment.get("segment_pool_id", ())) == tuple(handle)
    ]
