"""The state of a model at one moment: to tell what a call has changed, and to undo it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from pytest_cudagraph.state.storages import SavedStorage, TensorLayout, has_bits, layout_of, same_bits, tensor_at
from pytest_cudagraph.state.walk import View, look_at

Extras = Mapping[str, Any] | Iterable[Any]

_MAX_VALUE_CHARS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What differs from a snapshot, by name; false when nothing does."""

    written: tuple[str, ...] = ()
    """Tensors in the same memory that hold other bits; tied tensors under their first name."""
    rebound: tuple[str, ...] = ()
    """Names that now stand for other memory, or for the same memory in another shape, stride or dtype."""
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
    """One tensor as it was. ``alias`` shares its memory, to give it back should ``.data`` be replaced."""

    tensor: torch.Tensor
    alias: torch.Tensor
    layout: TensorLayout
    requires_grad: bool


class Snapshot:
    """Everything a model holds: tensors bit by bit, plain values, containers, training flags; see :meth:`take`."""

    def __init__(self, model: Any, extras: Extras = ()) -> None:
        self._model = model
        self._extras = _named(extras)
        with _plain_mode():
            self._view = look_at(model, self._extras)
            self._held = {name: _held(tensor) for name, tensor in self._view.tensors.items()}
            self._storages = _saved_storages(self._view.tensors.values())

    @classmethod
    def take(cls, model: Any, *, extras: Extras = ()) -> Snapshot:
        """Save what ``model`` (a module or any callable) and ``extras`` (opaque inputs, such as a cache) hold now.

        Costs as much memory as the state. Globals, class attributes and random generators are not part of it.
        """
        return cls(model, extras)

    @property
    def not_seen(self) -> tuple[str, ...]:
        """Names that could not be saved: sparse and nested tensors, containers too deep or too long."""
        return tuple(self._view.not_seen)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the saved tensors, each tensor once."""
        return tuple(_once(self._view))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The saved values by name, each tensor once; not copied again, so not to be written to."""
        with _plain_mode():
            return {name: self._saved(name) for name in self.names}

    def live(self) -> dict[str, torch.Tensor]:
        """The tensors that the model holds now, themselves, each once."""
        with _plain_mode():
            return _once(look_at(self._model, self._extras))

    def restore(self) -> None:
        """Put everything back in place: bits to the same addresses, entries to their containers, flags to modules."""
        with _plain_mode():
            for frame in self._view.frames:
                frame.restore()
            for held in {id(held.tensor): held for held in self._held.values()}.values():
                _restore_tensor(held)
            for saved in self._storages.values():
                saved.restore()

    def rewinder(self, names: Iterable[str]) -> Callable[[], None]:
        """What brings only these tensors back, as often and as quickly as a measurement needs it."""
        with _plain_mode():
            pairs = [(self._held[name].alias, self._saved(name)) for name in names]

        def rewind() -> None:
            with torch.no_grad():
                for live, saved in pairs:
                    live.copy_(saved)

        return rewind

    def changes(self) -> Changes:
        """What the model holds now, compared with what was saved."""
        with _plain_mode():
            now = look_at(self._model, self._extras)
            written, rebound = self._tensor_changes(now)
        old = self._view
        return Changes(
            written=written,
            rebound=rebound,
            added=tuple(name for name in now.tensors if name not in old.tensors),
            removed=tuple(name for name in old.tensors if name not in now.tensors),
            python=(*_plain_changes(old, now), *_length_changes(old, now), *self._grad_changes(now)),
            training=tuple(_training_changes(old, now)),
        )

    def _tensor_changes(self, now: View) -> tuple[tuple[str, ...], tuple[str, ...]]:
        touched = {address for address, saved in self._storages.items() if saved.changed}
        written: dict[TensorLayout, str] = {}
        rebound: list[str] = []
        for name, held in self._held.items():
            if name not in now.tensors:
                continue
            if layout_of(now.tensors[name]) != held.layout:
                rebound.append(name)
            elif held.layout.address in touched and held.layout not in written and not self._is_same(held.layout):
                written[held.layout] = name
        return tuple(written.values()), tuple(rebound)

    def _is_same(self, layout: TensorLayout) -> bool:
        saved = self._storages[layout.address]
        return same_bits(layout, saved.storage, saved.copy.untyped_storage())

    def _saved(self, name: str) -> torch.Tensor:
        held = self._held[name]
        if not has_bits(held.alias):
            return held.alias
        return tensor_at(held.layout, self._storages[held.layout.address].copy.untyped_storage())

    def _grad_changes(self, now: View) -> list[str]:
        both = [
            (name, held.requires_grad, now.tensors[name]) for name, held in self._held.items() if name in now.tensors
        ]
        return [
            f"{name}.requires_grad: {old} -> {new.requires_grad}" for name, old, new in both if old != new.requires_grad
        ]


def live(model: Any, *, extras: Extras = ()) -> dict[str, torch.Tensor]:
    """The tensors that a model and extras hold now, themselves, by the names a snapshot uses; each once."""
    with _plain_mode():
        return _once(look_at(model, _named(extras)))


def _plain_mode() -> AbstractContextManager[object]:
    """Neither gradients nor inference tensors: what is made here can be read and written in any mode."""
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    return stack


def _named(extras: Extras) -> list[tuple[str, Any]]:
    if isinstance(extras, Mapping):
        return list(extras.items())
    return [(f"extras[{position}]", extra) for position, extra in enumerate(extras)]


def _held(tensor: torch.Tensor) -> _Held:
    return _Held(tensor=tensor, alias=tensor.detach(), layout=layout_of(tensor), requires_grad=tensor.requires_grad)


def _saved_storages(tensors: Iterable[torch.Tensor]) -> dict[int, SavedStorage]:
    saved: dict[int, SavedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if has_bits(tensor) and storage.data_ptr() not in saved:
            saved[storage.data_ptr()] = SavedStorage(storage)
    return saved


def _once(view: View) -> dict[str, torch.Tensor]:
    """Without the second names of tied tensors."""
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
        # torch lets inference tensors ask for gradients within inference mode only.
        with torch.inference_mode(held.tensor.is_inference()):
            held.tensor.requires_grad_(held.requires_grad)


def _plain_changes(old: View, now: View) -> list[str]:
    found: list[str] = []
    for name, value in old.plain.items():
        if name in now.plain:
            if not _is_equal(value, now.plain[name]):
                found.append(f"{name}: {_text(value)} -> {_text(now.plain[name])}")
        elif name not in now.tensors and name not in old.entries:
            found.append(f"{name}: {_text(value)} -> {'another object' if name in now.lengths else 'gone'}")
    new = [name for name in now.plain if name not in old.plain]
    told = old.tensors.keys() | now.entries
    return found + [f"{name}: not there -> {_text(now.plain[name])}" for name in new if name not in told]


def _length_changes(old: View, now: View) -> list[str]:
    both = [(name, length, now.lengths[name]) for name, length in old.lengths.items() if name in now.lengths]
    return [f"len({name}): {before} -> {after}" for name, before, after in both if before != after]


def _training_changes(old: View, now: View) -> list[str]:
    both = [(name, flag, now.training[name]) for name, flag in old.training.items() if name in now.training]
    return [f"{name or 'model'}: {before} -> {after}" for name, before, after in both if before != after]


def _is_equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    return bool(one == other) or (one != one and other != other)


def _text(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}..."
