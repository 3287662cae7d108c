"""Warm-up calls as seen by a bystander: which memory was there before the recorded call.

What the recorded call reads and no earlier call read, made or was given, has come from where a recording is blind.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

from pytest_cudagraph.backends.cpu.modes import QuietMode
from pytest_cudagraph.backends.cpu.storages import storage_key
from pytest_cudagraph.backends.cpu.traits import tensors_of


class Witness(QuietMode):
    """Sees the memory of whatever is dispatched; changes nothing, keeps nothing alive."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def has_seen(self, key: int) -> bool:
        """Whether this storage took part in a witnessed call and has been there since."""
        return key in self._seen

    def see(self, values: Any) -> None:
        """Take note of the tensors in arguments or results."""
        for tensor in tensors_of(values):
            key = storage_key(tensor)
            if key is not None and key not in self._seen:
                self._seen[key] = weakref.ref(tensor.untyped_storage(), partial(self._forget, key))

    def _forget(self, key: int, ref: object) -> None:
        # Once its storage is gone, a key may come to mean another one.
        self._seen.pop(key, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._watch(func, types, args, kwargs or {})

    def _watch(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if any(is_traceable_wrapper_subclass_type(cls) for cls in types):
            return NotImplemented  # torch then asks the subclass, whose inner operations come here
        self.see((args, kwargs))
        result = func(*args, **kwargs)
        self.see(result)
        return result


class _WitnessBesideDynamo(Witness):
    """The same where the compiler is loaded: it must not try to compile the witness's own frames."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._watch(func, types, args, kwargs or {})


def open_witness() -> Witness:
    """The witness for this process as it is now."""
    return _WitnessBesideDynamo() if "torch._dynamo" in sys.modules else Witness()
