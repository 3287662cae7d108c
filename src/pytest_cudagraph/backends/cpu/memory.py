"""The memory of a recording: the storages that it makes, changes and borrows."""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from pytest_cudagraph import sources
from pytest_cudagraph.backends.buffers import poison_value
from pytest_cudagraph.backends.capture_mode import storage_key, tensors_of
from pytest_cudagraph.errors import DeadTensorError
from pytest_cudagraph.units import plural
from pytest_cudagraph.values import Site

# at::MemOverlap::Yes: elements of the tensor share memory, as after expand.
_OVERLAPS = 1


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of the tensor, as one row."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


def poison(tensor: torch.Tensor) -> None:
    """Fill the whole storage with NaN, or with the sentinel of its dtype."""
    if tensor.is_quantized:
        torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(255)
        return
    whole(tensor).fill_(poison_value(tensor.dtype))


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether its storage lies at an address. That of a wrapper around other tensors does not."""
    try:
        storage = tensor.untyped_storage()
        return not storage.nbytes() or bool(storage.data_ptr())
    except NotImplementedError:  # sparse, oneDNN
        return True
    except RuntimeError:
        return False


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, so that torch refuses to write the whole tensor."""
    return torch._debug_has_internal_overlap(tensor) == _OVERLAPS


def copier(buffer: torch.Tensor) -> Callable[[torch.Tensor], object]:
    """A function that writes a result of the same layout into ``buffer``."""
    if not overlaps(buffer):
        return buffer.copy_
    row = whole(buffer)
    return lambda result: row.copy_(whole(result))


def same_layout(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in new memory with the same strides, including gaps and overlaps."""
    storage = whole(tensor).clone().untyped_storage()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        storage, tensor.storage_offset(), tensor.shape, tensor.stride()
    )


class StorageHistory:
    """The storages that a recording made, and the old contents of those that it wrote to."""

    def __init__(self) -> None:
        self._made: dict[int, torch.Tensor] = {}
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def add_made(self, key: int, tensor: torch.Tensor) -> None:
        # The alias keeps the storage alive, so that no other storage gets its key.
        self._made.setdefault(key, tensor.detach())

    def is_made(self, key: int | None) -> bool:
        return key in self._made

    def save(self, tensors: Iterable[torch.Tensor]) -> None:
        """Save the contents of these storages, once each, except those that the recording made."""
        for tensor in tensors:
            key = storage_key(tensor)
            if key is not None and key not in self._made and key not in self._before:
                row = whole(tensor)
                self._before[key] = (row, row.clone())

    def undo(self) -> None:
        """Restore the saved contents."""
        for row, before in self._before.values():
            row.copy_(before)
        self._before.clear()

    def poison(self) -> None:
        for tensor in self._made.values():
            poison(tensor)

    def made_among(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """One tensor for each storage of these tensors that the recording made."""
        keys = {storage_key(tensor) for tensor in tensors}
        return [tensor for key, tensor in self._made.items() if key in keys]

    @property
    def size_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._made.values())


ResultPath = tuple[int, ...]


def fresh_results(
    result: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[ResultPath, torch.Tensor], ...]:
    """Results that share no storage with an argument. The schema does not tell: reshape is a view only sometimes."""
    given = {storage_key(tensor) for tensor in tensors_of([args, dict(kwargs)])} - {None}
    return tuple((path, tensor) for path, tensor in _walk(result) if storage_key(tensor) not in given)


def _walk(result: Any, path: ResultPath = ()) -> Iterator[tuple[ResultPath, torch.Tensor]]:
    if isinstance(result, torch.Tensor):
        yield path, result
    elif isinstance(result, (list, tuple)):
        for index, item in enumerate(result):
            yield from _walk(item, (*path, index))


_SHOWN = 5
_TABLES = frozenset({"_parameters", "_buffers", "_modules"})
_address_of = torch.UntypedStorage.data_ptr


@dataclass(frozen=True, slots=True, kw_only=True)
class _Borrowed:
    """One storage at capture, and the operation that read it first."""

    storage: weakref.ref[torch.UntypedStorage]
    address: int
    borrowed: torch.UntypedStorage
    """The same memory, without ownership."""
    text: str

    @property
    def is_there(self) -> bool:
        storage = self.storage()
        return storage is not None and _address_of(storage) == self.address


class BorrowedMemory:
    """The memory that one tape reads by address and does not own. ``names`` has the model's names by storage key."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._borrowed: dict[int, _Borrowed] = {}
        self._is_dead = False
        self._movable: list[weakref.ref[torch.UntypedStorage]] = []
        self._addresses: list[int] = []

    def borrow(self, tensor: torch.Tensor, operation: str) -> torch.Tensor:
        """An alias that does not keep the memory alive. Check :meth:`is_stale` before each use."""
        key = storage_key(tensor)
        if key is None or not tensor.untyped_storage().data_ptr():
            return plain_alias(tensor)  # it has no memory at an address (sparse, oneDNN)
        if key not in self._borrowed:
            self._borrowed[key] = self._first_use(tensor, key, operation)
        alias = plain_alias(tensor)
        borrowed = self._borrowed[key].borrowed
        return alias.set_(borrowed, tensor.storage_offset(), tensor.shape, tensor.stride())

    def is_stale(self) -> bool:
        """Whether memory was freed, or memory of other tensors than parameters has moved.

        Runs before every replay. Freed memory sets a flag, and only tensors that code may resize are compared.
        """
        if self._is_dead:
            return True
        try:
            return bool(self._movable) and [_address_of(ref()) for ref in self._movable] != self._addresses  # type: ignore[arg-type]
        except TypeError:  # the storage was freed in between, so the reference is None
            return True

    def has_moved(self) -> bool:
        """Whether any memory was freed or has moved, that of parameters included."""
        return not all(each.is_there for each in self._borrowed.values())

    def error(self, batch_size: int) -> DeadTensorError:
        """The error for freed or moved memory, with its names, operations and lines."""
        gone = [each.text for each in self._borrowed.values() if not each.is_there]
        lines = gone[:_SHOWN] + ([f"and {len(gone) - _SHOWN} more"] if len(gone) > _SHOWN else [])
        return DeadTensorError(
            "\n  ".join(
                [
                    f"replay detected {plural(len(gone), 'dead tensor')}: the graph of batch size {batch_size} "
                    "reads memory by its address at capture, which has been freed since",
                    *lines,
                    "write new values with copy_() into the tensor that was captured, or capture again",
                ]
            )
        )

    def _first_use(self, tensor: torch.Tensor, key: int, operation: str) -> _Borrowed:
        storage = tensor.untyped_storage()
        ref = weakref.ref(storage, self._mark_dead)
        if not isinstance(tensor, nn.Parameter):
            self._movable.append(ref)
            self._addresses.append(storage.data_ptr())
        return _Borrowed(
            storage=ref,
            address=storage.data_ptr(),
            borrowed=_not_owned(storage),
            text=_text(tensor, self._names.get(key, ""), operation, sources.user_site()),
        )

    def _mark_dead(self, ref: object) -> None:
        self._is_dead = True


def plain_alias(tensor: torch.Tensor) -> torch.Tensor:
    """An alias that later changes of the tensor object do not affect. Runs no Python code of a subclass."""
    with torch._C.DisableTorchFunctionSubclass():
        alias = tensor.detach()
        is_named_only = type(alias).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        return alias if type(alias) is torch.Tensor or not is_named_only else alias.as_subclass(torch.Tensor)


def names_of(model: Callable[..., Any]) -> dict[int, str]:
    """The names of a module's tensors by storage key."""
    names: dict[int, str] = {}
    for name, tensor in held_by(model):
        key = storage_key(tensor)
        if key is not None:
            names.setdefault(key, name)
    return names


def held_by(model: Callable[..., Any]) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a module, with names. A bound method stands for its module."""
    module = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
    found: list[tuple[str, torch.Tensor]] = []
    if not isinstance(module, nn.Module):
        return found
    with torch._C.DisableTorchFunctionSubclass():
        for prefix, part in module.named_modules():
            for name, value in _held(part):
                # A container that holds itself has no end.
                with contextlib.suppress(RecursionError):
                    found += [(f"{prefix}.{name}" if prefix else name, tensor) for tensor in tensors_of(value)]
    return found


def _held(module: nn.Module) -> Iterable[tuple[str, Any]]:
    yield from module._parameters.items()
    yield from module._buffers.items()
    for name, value in vars(module).items():
        if name not in _TABLES:
            yield name, value
            # A scheduler, a cache: an object that is no module.
            if not isinstance(value, nn.Module | torch.Tensor | type | ModuleType):
                yield from ((f"{name}.{inner}", each) for inner, each in getattr(value, "__dict__", {}).items())


def _not_owned(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def _text(tensor: torch.Tensor, name: str, operation: str, site: Site | None) -> str:
    what = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    place = f", {sources.describe(site)}" if site is not None else ""
    return f"{name + ': ' if name else ''}{what}, read by {operation}{place}"
