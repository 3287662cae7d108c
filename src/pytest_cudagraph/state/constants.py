"""The parameters that calls do not write. A checksum shows that this holds, where a copy needs as much memory again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from pytest_cudagraph.state.storages import SMALL_BYTES, SummedStorage, has_bits, plain_mode
from pytest_cudagraph.state.walk import look_at


class Constants:
    """The large parameters of a model that its calls do not write, with checksums. A snapshot does not copy them."""

    def __init__(self, storages: Mapping[int, tuple[str, SummedStorage]]) -> None:
        self._storages = storages

    @classmethod
    def take(cls, model: Any) -> Constants:
        """All large parameters of ``model``, with their values now."""
        with plain_mode():
            storages: dict[int, tuple[str, SummedStorage]] = {}
            for name, tensor in look_at(model).tensors.items():
                storage = tensor.untyped_storage()
                is_large = isinstance(tensor, nn.Parameter) and has_bits(tensor) and storage.nbytes() > SMALL_BYTES
                if is_large and storage.data_ptr() not in storages:
                    storages[storage.data_ptr()] = name, SummedStorage(storage)
        return cls(storages)

    def __contains__(self, address: int) -> bool:
        return address in self._storages

    def __bool__(self) -> bool:
        return bool(self._storages)

    def renewed(self) -> Constants:
        """The same with the values of now: a test may change its model between two stages."""
        with plain_mode():
            return Constants({at: (name, SummedStorage(each.storage)) for at, (name, each) in self._storages.items()})

    def changed(self) -> tuple[str, ...]:
        """The names of those whose values are others now. They cannot be restored."""
        with plain_mode():
            return tuple(name for name, storage in self._storages.values() if storage.changed)

    def without(self, names: Collection[str]) -> Constants:
        """The same without these. They are copied then, like other state."""
        return Constants({at: each for at, each in self._storages.items() if each[0] not in names})


NO_CONSTANTS = Constants({})
"""Nothing is known about what calls write, so that everything is copied."""
