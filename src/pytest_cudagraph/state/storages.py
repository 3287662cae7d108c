"""Tensors as memory: where they lie, and whether the bits there are what they were.

Whole storages are saved and compared, so that tied parameters and views are saved once, expanded tensors can be
written back, and NaN equals NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of the size of each element: they compare as bits."""


class TensorLayout(NamedTuple):
    """Where a tensor lies; two tensors of equal layout are the same memory read in the same way."""

    address: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class SavedStorage:
    """A copy of one storage. Holds the storage too, so that its address is not given to another."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self._words = words_of(storage)
        self.copy = self._words.clone()

    @property
    def changed(self) -> bool:
        """Whether any bit differs now, or the storage was resized."""
        return self.storage.nbytes() != self.copy.nbytes or not torch.equal(self._words, self.copy)

    def restore(self) -> None:
        """Write the copy back; to the same address, unless the storage was resized."""
        if self.storage.nbytes() != self.copy.nbytes:
            self.storage.resize_(self.copy.nbytes)
        self._words.copy_(self.copy)


def is_addressable(tensor: torch.Tensor) -> bool:
    """Whether the tensor is strided memory (or meta, without any); not sparse, nested, or simulated."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    try:
        storage = tensor.untyped_storage()
        # A simulated tensor says it is on a device while its storage is on meta; asking its address would warn.
        return storage.device.type == tensor.device.type and storage.data_ptr() >= 0
    except (RuntimeError, NotImplementedError):  # wrapper subclasses own no memory
        return False


def layout_of(tensor: torch.Tensor) -> TensorLayout:
    """Where the tensor lies now."""
    return TensorLayout(
        tensor.untyped_storage().data_ptr(),
        int(tensor.storage_offset()),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.device,
    )


def has_bits(tensor: torch.Tensor) -> bool:
    """Whether there is memory to save: not for meta and empty tensors."""
    return tensor.device.type != "meta" and tensor.untyped_storage().nbytes() > 0


def words_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """The whole storage as a vector of integers, sharing its memory."""
    dtype = torch.int64 if storage.nbytes() % 8 == 0 else torch.uint8
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage)


def same_bits(layout: TensorLayout, one: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
    """Whether two storages hold the same bits where a tensor of this layout lies."""
    return torch.equal(_words_at(layout, one), _words_at(layout, other))


def tensor_at(layout: TensorLayout, storage: torch.UntypedStorage) -> torch.Tensor:
    """The tensor of this layout in a storage, sharing its memory."""
    made = torch.empty(0, dtype=layout.dtype, device=storage.device)
    return made.set_(storage, layout.offset, layout.shape, layout.strides)


def _words_at(layout: TensorLayout, storage: torch.UntypedStorage) -> torch.Tensor:
    size, offset, shape, strides = layout.dtype.itemsize, layout.offset, layout.shape, layout.strides
    if size == 16:  # complex128: two words an element
        size, offset, shape, strides = 8, offset * 2, (*shape, 2), (*(2 * stride for stride in strides), 1)
    made = torch.empty(0, dtype=_WORD[size], device=storage.device)
    return made.set_(storage, offset, shape, strides)
