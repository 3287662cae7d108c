"""Whole storages: who made them, what was in them before, what says that nobody has written them yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from pytest_cudagraph.backends.poison import poison_value

# What torch says of a tensor whose elements share memory, as after expand (at::MemOverlap::Yes).
_OVERLAPS = 1


def storage_key(tensor: torch.Tensor) -> int | None:
    """The identity of a tensor's storage; None for layouts that have none (sparse, oneDNN)."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # torch has no other way to ask
        return None


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's storage from its first to its last element, as one row."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


def poison(tensor: torch.Tensor) -> None:
    """Fill the whole storage with NaN, or with what stands for it in other dtypes."""
    if tensor.is_quantized:
        torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(255)
        return
    whole(tensor).fill_(poison_value(tensor.dtype))


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, so that torch refuses to write the tensor as a whole."""
    return torch._debug_has_internal_overlap(tensor) == _OVERLAPS


def copier(buffer: torch.Tensor) -> Callable[[torch.Tensor], object]:
    """What writes a result of the same layout into ``buffer``."""
    if not overlaps(buffer):
        return buffer.copy_
    row = whole(buffer)
    return lambda result: row.copy_(whole(result))


def same_layout(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own with the same strides, gaps and overlaps included."""
    storage = whole(tensor).clone().untyped_storage()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        storage, tensor.storage_offset(), tensor.shape, tensor.stride()
    )


class Ledger:
    """Which storages a recording made, and what was in the others before it wrote to them."""

    def __init__(self) -> None:
        self._made: dict[int, torch.Tensor] = {}
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def add_made(self, key: int, tensor: torch.Tensor) -> None:
        # The alias keeps the storage, so that its key cannot come to mean another one.
        self._made.setdefault(key, tensor.detach())

    def is_made(self, key: int | None) -> bool:
        return key in self._made

    def save(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep what is in these storages, once each, unless the recording made them itself."""
        for tensor in tensors:
            key = storage_key(tensor)
            if key is not None and key not in self._made and key not in self._before:
                row = whole(tensor)
                self._before[key] = (row, row.clone())

    def undo(self) -> None:
        """Put back what was written to storages that existed before the recording."""
        for row, before in self._before.values():
            row.copy_(before)
        self._before.clear()

    def poison(self) -> None:
        for tensor in self._made.values():
            poison(tensor)

    def made_among(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Of these tensors' storages those that the recording made, one tensor for each."""
        keys = {storage_key(tensor) for tensor in tensors}
        return [tensor for key, tensor in self._made.items() if key in keys]

    @property
    def size_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._made.values())
