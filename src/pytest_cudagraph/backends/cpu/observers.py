"""The dispatch modes that see every operation of a warm-up call and of the recorded call."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass_type

from pytest_cudagraph import hazards
from pytest_cudagraph.backends.cpu.tape import OpaqueCall, Refusals, Tape
from pytest_cudagraph.backends.dispatch import ObservingMode, hidden_from_compiler, storage_key, tensors_of


class SeenMemory(ObservingMode):
    """Notes the storages of all dispatched operations, without keeping them alive."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def has_seen(self, key: int) -> bool:
        """Whether an observed call used this storage, which still exists."""
        return key in self._seen

    def see(self, values: Any) -> None:
        """Note the tensors in arguments or results."""
        for tensor in tensors_of(values):
            key = storage_key(tensor)
            if key is not None and key not in self._seen:
                self._seen[key] = weakref.ref(tensor.untyped_storage(), partial(self._forget, key))

    def _forget(self, key: int, ref: object) -> None:
        # Another storage may get the key of a freed one.
        self._seen.pop(key, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(cls) for cls in types):
            return NotImplemented  # torch then asks the subclass, whose inner operations come here
        kwargs = kwargs or {}
        self.see((args, kwargs))
        result = func(*args, **kwargs)
        self.see(result)
        return result


def watch_memory() -> SeenMemory:
    """A new observer of memory."""
    return hidden_from_compiler(SeenMemory)()


_DENSE_KEY = torch._C.DispatchKey.CompositeExplicitAutograd

# The host reads a tensor to decide, except in torch's conditional graphs.
_READS_ITS_CONDITION = frozenset({"cond", "while_loop"})

# The plain forms of most other operators do not run under a dispatch mode.
_KNOWN_PARTS = frozenset({"flex_attention"})


class OperationRecorder(ObservingMode):
    """Records the operations of one call on a tape, and refuses what a CUDA capture refuses."""

    supports_higher_order_operators = True

    def __init__(self, tape: Tape, refusals: Refusals) -> None:
        super().__init__()
        self._tape = tape
        self._refusals = refusals

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._record(func, types, args, kwargs or {})

    def record_region(self, region: OpaqueCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Record compiled code as one step."""
        self._refusals.check()
        # This call does not come from the dispatcher, so the modes are still on.
        with self._refusals.paused(), _disable_current_modes():
            return self._tape.record_region(region, args, kwargs)

    def _record(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._refusals.check()
        if any(is_traceable_wrapper_subclass_type(cls) for cls in types):
            return NotImplemented  # torch then asks the subclass, whose inner operations come here
        found = hazards.refusal(func, args, kwargs, from_host=self._tape.is_number)
        if found is not None:
            self._refusals.refuse(found.text, hazard=found.id, operation=found.operation)
        if isinstance(func, torch._ops.OpOverload):
            with self._refusals.paused():
                return self._tape.record(func, args, kwargs)
        return self._record_parts(func, args, kwargs)

    def _record_parts(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Record the operations that the plain form of a higher-order operator dispatches."""
        name = func.name()
        if name in _READS_ITS_CONDITION:
            self._refusals.refuse(hazards.CAPTURE_UNSUPPORTED.text, hazard="host-sync", operation=name)
        if name not in _KNOWN_PARTS:
            text = "the CPU twin does not support this higher-order operator"
            self._refusals.refuse(text, hazard="unknown-op", operation=name)
        with self:
            return func.py_kernels[_DENSE_KEY](*args, **kwargs)


def open_recorder(tape: Tape, refusals: Refusals) -> OperationRecorder:
    """A new recorder of operations."""
    return hidden_from_compiler(OperationRecorder)(tape, refusals)
