"""Bytes of a decoder's calls, counted operation by operation: exact on any device, on ``meta`` without any memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from pytest_cudagraph import pytree
from pytest_cudagraph.backends.capture_mode import ObservingMode
from pytest_cudagraph.backends.cpu.operators import traits_of


class PeakBytes(ObservingMode):
    """Counts the bytes of the tensors that operations inside return, and the most that live at once.

    A tensor counts with the size of its storage until that is freed. Tensors that existed before do not count. What an
    operation uses inside (a workspace) is not seen.
    """

    def __init__(self, existing: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._existing = {_key(tensor): tensor.untyped_storage().nbytes() for tensor in existing}
        self._written: set[int] = set()
        self._read: set[int] = set()
        self._live: dict[int, int] = {}
        self._live_bytes = 0

    @property
    def written_bytes(self) -> int:
        """The storages that existed before and were written to."""
        return sum(self._existing[key] for key in self._written)

    @property
    def read_bytes(self) -> int:
        """The other storages that existed before and were read."""
        return sum(self._existing[key] for key in self._read - self._written)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        written = traits_of(func).written(args, kwargs)
        self._written |= {_key(tensor) for tensor in written} & self._existing.keys()
        self._read |= {_key(tensor) for tensor in pytree.tensors_in((args, kwargs))} & self._existing.keys()
        output = func(*args, **kwargs)
        for tensor in pytree.tensors_in(output):
            self._count(tensor.untyped_storage())
        return output

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size_bytes = storage._cdata, storage.nbytes()
        if key not in self._live and key not in self._existing:
            self._live[key] = size_bytes
            self._live_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self._live_bytes -= self._live.pop(key)


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
