"""Tensors that the source puts on the host by name, followed on a CPU to where they meet tensors of the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_cudagraph.audit.trace import identity_of, storage_of
from pytest_cudagraph.hazards import Refusal
from pytest_cudagraph.sources import Sites, user_frame, user_sites
from pytest_cudagraph.sources.literals import names_host

_TAKES_BOTH = frozenset(
    "_pack_padded_sequence pack_padded_sequence tensor_split ctc_loss _ctc_loss lstm gru rnn_tanh rnn_relu".split()
)
"""Operations that take some of their arguments (lengths, sections) on the host, whatever the others."""


class _Made(NamedTuple):
    """Memory that need not be on the device; ``named`` where the source says that it is on the host."""

    storage: StorageWeakRef
    named: str
    sites: Sites


class Placement:
    """Where one call's tensors lie, as far as that is certain; ``device`` is the memory of inputs and state."""

    def __init__(self, device: Iterable[int]) -> None:
        self._device = set(device)
        self._made: dict[int, _Made] = {}

    def judge(self, name: str, given: Sequence[torch.Tensor]) -> tuple[Refusal, Sites] | None:
        """The refusal of an operation that takes a host's tensor beside the device's, and where that was made.

        A number (no dimensions) is taken by value, as CUDA takes it.
        """
        if not self._made or name in _TAKES_BOTH or not self._touches_device(given):
            return None
        for tensor in given:
            made = self._made.get(identity_of(tensor))
            if made is not None and made.named and tensor.dim() > 0:
                text = f"made on the host by name; {name} takes it beside tensors of the device"
                return Refusal(id="host-data", text=text, operation=made.named), made.sites
        return None

    def remember(self, func: Any, name: str, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        """Take note of where an operation puts its results: with its tensors, or where the source says."""
        if self._touches_device(given):
            self._device.update(map(identity_of, made))
            return
        origin = self._origin(given) if given else _named_host(func, name)
        for tensor in made:
            storage = storage_of(tensor)
            if storage is not None:
                self._made[storage.cdata] = _Made(storage, *origin)

    def _touches_device(self, given: Sequence[torch.Tensor]) -> bool:
        ids = map(identity_of, given)
        return any(id_ in self._device and id_ not in self._made for id_ in ids)

    def _origin(self, given: Sequence[torch.Tensor]) -> tuple[str, Sites]:
        sources = (self._made.get(identity_of(tensor)) for tensor in given)
        named = next((source for source in sources if source is not None and source.named), None)
        return ("", Sites()) if named is None else (named.named, named.sites)


def _named_host(func: Any, name: str) -> tuple[str, Sites]:
    frame = user_frame()
    if frame is None or not names_host(frame, name):
        return "", Sites()
    return str(getattr(func, "overloadpacket", func)), user_sites()
