"""Save the state of a model, find what a call has changed, and restore it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pytest_cudagraph import pytree
from pytest_cudagraph.state.storages import (
    SMALL_BYTES,
    SavedStorage,
    SummedStorage,
    TensorLayout,
    has_bits,
    layout_of,
    plain_mode,
    tensor_at,
)
from pytest_cudagraph.state.walk import View, look_at, plain_changes, training_changes

Extras = Mapping[str, Any] | Iterable[Any]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What differs from a snapshot, by name. False if nothing does."""

    written: tuple[str, ...] = ()
    """Tensors changed in place. Tied tensors under their first name."""
    rebound: tuple[str, ...] = ()
    """Names that now refer to other memory, or to the same memory with another shape, stride or dtype."""
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    python: tuple[str, ...] = ()
    """Plain values and lengths of containers: ``steps: 3 -> 4``."""
    training: tuple[str, ...] = ()
    """Modules whose training flag differs: ``encoder.dropout: False -> True``."""

    @property
    def names(self) -> tuple[str, ...]:
        """Everything that differs."""
        return (*self.written, *self.rebound, *self.added, *self.removed, *self.python, *self.training)

    def __bool__(self) -> bool:
        return bool(self.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """One tensor as it was. ``alias`` shares its memory, and restores it if ``.data`` was replaced."""

    tensor: torch.Tensor
    alias: torch.Tensor
    layout: TensorLayout
    requires_grad: bool


class Snapshot:
    """A copy of everything a model holds: tensors, plain values, containers, training flags."""

    def __init__(
        self,
        model: Any,
        extras: Extras = (),
        constants: Constants = NO_CONSTANTS,
        saved: Mapping[int, SavedStorage] | None = None,
    ) -> None:
        self._constants = constants
        self._model = model
        self._extras = _named(extras)
        with plain_mode():
            self._view = look_at(model, self._extras)
            self._held = {name: _held(tensor) for name, tensor in self._view.tensors.items()}
            self._storages = _saved_storages(self._view.tensors.values(), constants, saved or {})

    @classmethod
    def take(cls, model: Any, *, extras: Extras = (), constants: Constants = NO_CONSTANTS) -> Snapshot:
        """Save what ``model`` (a module or any callable) and ``extras`` (opaque inputs, such as a cache) hold now.

        Needs as much memory as the state without ``constants``, which are neither copied nor compared. Globals, class
        attributes and random generators are not saved.
        """
        return cls(model, extras, constants)

    def taken_again(self) -> Snapshot:
        """What the model holds now. Memory that this snapshot has saved keeps its saved values, and is not copied."""
        return Snapshot(self._model, dict(self._extras), self._constants, self._storages)

    def of_extras(self) -> Snapshot:
        """The same of the extras alone, with the same saved memory."""
        return Snapshot(None, dict(self._extras), self._constants, self._storages)

    @property
    def not_seen(self) -> tuple[str, ...]:
        """Names that could not be saved: sparse and nested tensors, containers too deep or too long."""
        return tuple(self._view.not_seen)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the saved tensors, each tensor once."""
        return tuple(_once(self._view))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The saved values by name, each tensor once. Do not write to them."""
        with plain_mode():
            return {name: self._saved(name) for name in self.names}

    def live(self) -> dict[str, torch.Tensor]:
        """The tensors that the model holds now, each once, not copied."""
        with plain_mode():
            return _once(look_at(self._model, self._extras))

    def restore(self) -> None:
        """Restore everything: bits at the same addresses, entries of containers, flags of modules."""
        with plain_mode():
            for frame in self._view.frames:
                frame.restore()
            for held in {id(held.tensor): held for held in self._held.values()}.values():
                _restore_tensor(held)
            for saved in self._storages.values():
                saved.restore()

    def rewinder(self, names: Iterable[str] | None = None) -> Callable[[], None]:
        """A fast function that restores only the values of these tensors, of all by default.

        What a call has made or assigned stays. Measurements call it often.
        """
        addresses = {self._held[name].layout.address for name in (self._held if names is None else names)}
        saved = [each for address, each in self._storages.items() if address in addresses]

        def rewind() -> None:
            for each in saved:
                each.restore()

        return rewind

    def changes(self, *, values: bool = True) -> Changes:
        """Compare what the model holds now with what was saved. Without ``values``, nothing counts as written."""
        with plain_mode():
            is_same = self._view.is_framed and all(frame.is_same() for frame in self._view.frames)
            now = self._view if is_same else look_at(self._model, self._extras)
            written, rebound = self._tensor_changes(now, values)
        old = self._view
        return Changes(
            written=written,
            rebound=rebound,
            added=tuple(name for name in now.tensors if name not in old.tensors),
            removed=tuple(name for name in old.tensors if name not in now.tensors),
            python=(*plain_changes(old, now), *self._grad_changes(now)),
            training=tuple(training_changes(old, now)),
        )

    def _tensor_changes(self, now: View, values: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
        touched = {address for address, saved in self._storages.items() if values and saved.changed}
        written: dict[TensorLayout, str] = {}
        rebound: list[str] = []
        for name, held in self._held.items():
            if name not in now.tensors:
                continue
            if layout_of(now.tensors[name]) != held.layout:
                rebound.append(name)
            elif held.layout.address in touched and held.layout not in written:
                if not pytree.same_bits(held.alias, self._saved(name)):
                    written[held.layout] = name
        return tuple(written.values()), tuple(rebound)

    def _saved(self, name: str) -> torch.Tensor:
        held = self._held[name]
        if held.layout.address not in self._storages:  # a constant, or without memory
            return held.alias
        return tensor_at(held.layout, self._storages[held.layout.address].copy.untyped_storage())

    def _grad_changes(self, now: View) -> list[str]:
        old = {name: held.requires_grad for name, held in self._held.items() if name in now.tensors}
        new = {name: now.tensors[name].requires_grad for name in old}
        return [f"{name}.requires_grad: {old[name]} -> {new[name]}" for name in old if old[name] != new[name]]


def live(model: Any, *, extras: Extras = ()) -> dict[str, torch.Tensor]:
    """The tensors that a model and extras hold now, by the names of a snapshot, each once, not copied."""
    with plain_mode():
        return _once(look_at(model, _named(extras)))


def _named(extras: Extras) -> list[tuple[str, Any]]:
    if isinstance(extras, Mapping):
        return list(extras.items())
    return [(f"extras[{position}]", extra) for position, extra in enumerate(extras)]


def _held(tensor: torch.Tensor) -> _Held:
    return _Held(tensor=tensor, alias=tensor.detach(), layout=layout_of(tensor), requires_grad=tensor.requires_grad)


def _saved_storages(
    tensors: Iterable[torch.Tensor], constants: Constants, before: Mapping[int, SavedStorage]
) -> dict[int, SavedStorage]:
    saved: dict[int, SavedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if has_bits(tensor) and address not in saved and address not in constants:
            saved[address] = before.get(address) or SavedStorage(storage)
    return saved


def _once(view: View) -> dict[str, torch.Tensor]:
    """The tensors, each under its first name."""
    seen: set[TensorLayout | int] = set()
    found: dict[str, torch.Tensor] = {}
    for name, tensor in view.tensors.items():
        key = layout_of(tensor) if has_bits(tensor) else id(tensor)
        if key not in seen:
            seen.add(key)
            found[name] = tensor
    return found


def _restore_tensor(held: _Held) -> None:
    if layout_of(held.tensor) != held.layout:
        held.tensor.data = held.alias
    if held.tensor.requires_grad != held.requires_grad:
        # An inference tensor accepts this only within inference mode.
        with torch.inference_mode(held.tensor.is_inference()):
            held.tensor.requires_grad_(held.requires_grad)
