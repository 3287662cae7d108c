"""Memory that nobody owns: filled with a pattern that no right program reads."""

from __future__ import annotations

import gc
from typing import Any

import torch

_PATTERN = 0xFF
"""NaN in every floating dtype, and a number far out of range in every integer one."""


class _Bytes:
    """Device memory by its address, as torch takes it from other libraries."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def segments() -> list[dict[str, Any]]:
    """The segments of torch's allocator, each with its blocks and the id of its pool."""
    snapshot: list[dict[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return snapshot


def pool_ranges() -> list[tuple[int, int]]:
    """First and last address of each segment that belongs to a graph's pool."""
    private = [each for each in segments() if tuple(each["segment_pool_id"]) != (0, 0)]
    return [(each["address"], each["address"] + each["total_size"]) for each in private]


def is_inside(address: int, ranges: list[tuple[int, int]]) -> bool:
    """Whether an address lies in one of the ranges."""
    return any(begin <= address < end for begin, end in ranges)


def poison_free_blocks() -> None:
    """Fill every block of the allocator that no tensor owns.

    The pools of graphs too: between replays, the memory of a graph's intermediate results belongs to nobody. A replay
    writes them before it reads them.
    """
    torch.cuda.synchronize()
    with torch.inference_mode(False), torch.no_grad():
        for segment in segments():
            for block in segment["blocks"]:
                if block["state"] == "inactive":
                    torch.as_tensor(_Bytes(block["address"], block["size"]), device="cuda").fill_(_PATTERN)
    torch.cuda.synchronize()


def reserved_bytes() -> int:
    """What the allocator holds and cannot give back now."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved())
