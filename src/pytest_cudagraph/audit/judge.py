"""The rules of a capture, applied to the operations of one call as they come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from pytest_cudagraph import hazards
from pytest_cudagraph.audit.operators import Facts
from pytest_cudagraph.audit.placement import Placement
from pytest_cudagraph.audit.trace import identity_of, storage_of
from pytest_cudagraph.hazards import Refusal
from pytest_cudagraph.protocols import Backend
from pytest_cudagraph.sources import Sites

_read_number = torch.Tensor.item  # as it is now: while host reads are watched another stands in its place


class Judge:
    """Judges each operation; remembers which tensors are numbers of Python, and which lie on the host by name."""

    def __init__(self, backend: Backend, device: Iterable[int]) -> None:
        self._is_gpu = backend.kind == "cuda"
        self._placement = None if self._is_gpu else Placement(device)
        self._numbers: dict[int, object] = {}

    def judge(
        self, facts: Facts, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Sequence[torch.Tensor]
    ) -> tuple[Refusal | None, Sites | None]:
        """What a capture says of an operation, and the line to tell where that is another than the running one."""
        found = hazards.judge(facts.func, args, kwargs, self._is_number) if facts.is_judged else None
        if self._placement is not None:
            is_refused = found is not None and found.level == "error"
            return (found, None) if is_refused else self._placement.judge(facts.short_name, given) or (found, None)
        if found is None:
            return None, None
        # On a GPU an operation on CPU tensors alone is the host's own business: nothing waits for the device. Copying
        # to the device is not.
        is_local = found.id in ("host-sync", "dynamic-shape") or facts.is_lift
        on_host_alone = bool(given) and all(tensor.device.type == "cpu" for tensor in given)
        return (None if is_local and on_host_alone else found), None

    def lift(self, tensor: torch.Tensor) -> Any:
        """Take note of a tensor made from data of the host; its number where it is one, which a graph freezes."""
        storage = storage_of(tensor)
        if tensor.dim() == 0 and storage is not None:
            self._numbers[storage.cdata] = storage
        return number_of(tensor)

    def place(self, facts: Facts, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        """Take note of where an operation puts its results."""
        if self._placement is not None:
            self._placement.remember(facts.func, facts.short_name, given, made)

    def _is_number(self, tensor: torch.Tensor) -> bool:
        return identity_of(tensor) in self._numbers


def number_of(tensor: torch.Tensor) -> Any:
    """The number that a tensor without dimensions holds; None for others."""
    return _read_number(tensor) if tensor.dim() == 0 and identity_of(tensor) else None
