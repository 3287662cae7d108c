"""What an operation gave: results in memory of their own, or aliases of what it was given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from pytest_cudagraph.backends.cpu.storages import storage_key
from pytest_cudagraph.backends.cpu.traits import tensors_of

Path = tuple[int, ...]


def fresh_results(
    result: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Path, torch.Tensor], ...]:
    """Results that share no storage with an argument: decided by storage, as reshape is a view only sometimes."""
    given = {storage_key(tensor) for tensor in tensors_of([args, dict(kwargs)])} - {None}
    return tuple((path, tensor) for path, tensor in _walk(result) if storage_key(tensor) not in given)


def _walk(result: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    if isinstance(result, torch.Tensor):
        yield path, result
    elif isinstance(result, (list, tuple)):
        for index, item in enumerate(result):
            yield from _walk(item, (*path, index))
