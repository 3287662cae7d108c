"""What runs on the device in a capture, and outside of one: dispatch modes that fill the records of the ledger."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from pytest_cudagraph.backends.capture_mode import ObservingMode, storage_key, tensors_of
from pytest_cudagraph.own_graphs.ledger import GraphRecord, MemoryUse, WatchedCall
from pytest_cudagraph.sources import user_site

_COPIES = frozenset({"copy_", "clone", "_to_copy", "fill_", "zero_", "_pin_memory", "_local_scalar_dense"})
"""Operators that bring inputs to a graph and outputs from it. They are no work of the model."""

_FACTORIES = frozenset({"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "lift_fresh"})
"""Operators without a kernel that make no view."""


class CaptureRecorder(ObservingMode):
    """Notes the operators of one capture, and the memory from before the capture that they use."""

    def __init__(self, record: GraphRecord) -> None:
        super().__init__()
        self._record = record
        self._made: dict[int, torch.UntypedStorage] = {}
        """What the capture made. Held until its end, so that no other storage gets the same key."""

    def observe(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if not is_view(func):
            shapes = tuple(tuple(tensor.shape) for tensor in tensors_of(result))
            self._record.operators.append((name_of(func), shapes))
        for tensor in tensors_of([*args, *kwargs.values()]):
            self._note_use(tensor, func)
        for tensor in tensors_of(result):
            key = storage_key(tensor)
            if key is not None and key not in self._record.memory:
                self._made.setdefault(key, tensor.untyped_storage())
        return result

    def _note_use(self, tensor: torch.Tensor, func: Any) -> None:
        key = storage_key(tensor)
        if key is None or key in self._made or key in self._record.memory:
            return
        storage = tensor.untyped_storage()
        use = MemoryUse(
            size_bytes=storage.nbytes(),
            operator=name_of(func),
            site=user_site(),
            is_host=tensor.device.type == "cpu",
            is_parameter=isinstance(tensor, torch.nn.Parameter),
            address=storage.data_ptr(),
        )
        self._record.memory[key] = use
        if self._record.watches_memory:
            _when_freed(storage, use, self._record)

    def forget_made(self) -> None:
        """Release what the capture made. Its owners are the program's own tensors."""
        self._made.clear()


def _when_freed(storage: torch.UntypedStorage, use: MemoryUse, record: GraphRecord) -> None:
    """Mark the use when the storage dies. Torch keeps the Python object of a storage as long as its memory."""

    def freed(reference: weakref.ref[Any]) -> None:
        use.is_freed = record.has_freed = True

    record.references.append(weakref.ref(storage, freed))


class CallRecorder(ObservingMode):
    """Notes the operators of one marked call that run on the device and in no graph."""

    def __init__(self, call: WatchedCall, is_capturing: Callable[[], bool]) -> None:
        super().__init__()
        self._call, self._is_capturing = call, is_capturing

    def observe(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if not self._is_capturing() and _is_work(func, result):
            name = name_of(func)
            self._call.eager[name] += 1
            if name not in self._call.sites:
                self._call.sites[name] = user_site()
        return result


def _is_work(func: Any, result: Any) -> bool:
    name = name_of(func)
    if name in _COPIES or name in _FACTORIES or is_view(func):
        return False
    return any(tensor.is_cuda for tensor in tensors_of(result))


def is_view(func: Any) -> bool:
    """Whether an operator only looks at memory in another way: it launches nothing."""
    return bool(getattr(func, "is_view", False))


def name_of(func: Any) -> str:
    """``mul`` for ``aten.mul.Tensor``."""
    return str(getattr(getattr(func, "overloadpacket", func), "__name__", func))
