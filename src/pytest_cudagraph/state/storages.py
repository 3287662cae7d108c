"""Tensors as memory: their addresses, and copies of their storages.

Whole storages are saved. So tied parameters and views are saved once, and expanded tensors can be restored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch


class TensorLayout(NamedTuple):
    """The address and format of a tensor. Tensors of equal layout read the same memory in the same way."""

    address: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class SavedStorage:
    """A copy of one storage. It also holds the storage, so that no other storage gets its address."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self._words = words_of(storage)
        self.copy = self._words.clone()

    @property
    def changed(self) -> bool:
        """Whether any bit differs now, or the storage was resized."""
        return self.storage.nbytes() != self.copy.nbytes or not torch.equal(self._words, self.copy)

    def restore(self) -> None:
        """Write the copy back, to the same address unless the storage was resized."""
        if self.storage.nbytes() != self.copy.nbytes:
            self.storage.resize_(self.copy.nbytes)
        self._words.copy_(self.copy)


_BLOCK_WORDS = 512
SMALL_BYTES = 128 * 1024
"""A smaller storage is copied: its checksum would hardly be smaller."""


class SummedStorage:
    """A storage that should not change, with sums of its words. It also holds the storage.

    The sums are those of each block of 4 KiB, and of each place in a block over all blocks: so an exchange within a
    block shows too.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self._bytes = storage.nbytes()
        self._words = words_of(storage)
        self._sums = self._summed()

    @property
    def changed(self) -> bool:
        """Whether a sum differs now, or the storage was resized."""
        return self.storage.nbytes() != self._bytes or not torch.equal(self._summed(), self._sums)

    def _summed(self) -> torch.Tensor:
        whole = self._words.numel() // _BLOCK_WORDS * _BLOCK_WORDS
        blocks = self._words[:whole].view(-1, _BLOCK_WORDS)
        sums = (blocks.sum(1, dtype=torch.int64), blocks.sum(0, dtype=torch.int64))
        return torch.cat([*sums, self._words[whole:].to(torch.int64)])


def is_addressable(tensor: torch.Tensor) -> bool:
    """Whether the tensor is strided (meta included). Sparse, nested and simulated tensors are not addressable."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    try:
        storage = tensor.untyped_storage()
        # A simulated tensor names a real device, but its storage is on meta. Its address would cause a warning.
        return storage.device.type == tensor.device.type and storage.data_ptr() >= 0
    except (RuntimeError, NotImplementedError):  # wrapper subclasses own no memory
        return False


def layout_of(tensor: torch.Tensor) -> TensorLayout:
    """The layout of the tensor now."""
    return TensorLayout(
        tensor.untyped_storage().data_ptr(),
        int(tensor.storage_offset()),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.device,
    )


def has_bits(tensor: torch.Tensor) -> bool:
    """Whether there is memory to save. Meta and empty tensors have none."""
    return tensor.device.type != "meta" and tensor.untyped_storage().nbytes() > 0


def words_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """The whole storage as a vector of integers that shares its memory."""
    dtype = torch.int64 if storage.nbytes() % 8 == 0 else torch.uint8
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage)


def tensor_at(layout: TensorLayout, storage: torch.UntypedStorage) -> torch.Tensor:
    """The tensor of this layout in a storage. It shares the memory."""
    made = torch.empty(0, dtype=layout.dtype, device=storage.device)
    return made.set_(storage, layout.offset, layout.shape, layout.strides)


@contextmanager
def plain_mode() -> Iterator[None]:
    """Without gradients and inference mode, so that tensors made here work in any mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield
