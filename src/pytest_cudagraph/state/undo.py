"""Warm-up and capture change what a model holds; afterwards nothing of that may be left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from pytest_cudagraph import pytree
from pytest_cudagraph.errors import CudagraphError
from pytest_cudagraph.protocols import Backend, Model
from pytest_cudagraph.state.snapshot import Extras, Snapshot


class Undo:
    """The state of a model, and the random generators, as they were when this was made.

    Holds a copy of the state, so let go of it after the captures. ``extras`` are opaque inputs, such as a cache.
    """

    def __init__(self, model: Model, backend: Backend, *, extras: Extras = ()) -> None:
        self._backend = backend
        self._snapshot = Snapshot.take(model, extras=extras)
        self._rng: Any = backend.rng_state()
        held = self._snapshot.live()
        self.addresses = {name: tensor.data_ptr() for name, tensor in held.items()}
        self._held = {id(tensor) for tensor in held.values()}
        self._kept: dict[int, torch.Tensor] = {}

    @property
    def kept(self) -> tuple[torch.Tensor, ...]:
        """State made while something was undone, which the model no longer holds: a graph may read it by address."""
        return tuple(self._kept.values())

    def written(self) -> dict[str, torch.Tensor]:
        """Copies of the state that by now holds other bits in the same memory, by name."""
        live = self._snapshot.live()
        return {name: live[name].clone() for name in self._snapshot.changes().written if name in live}

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo what happens inside, whether it ends well or not."""
        try:
            yield
        except BaseException:
            # A device that has failed cannot be written to either; the first error is the one to tell.
            with suppress(RuntimeError):
                self._bring_back()
            raise
        self._bring_back()

    def _bring_back(self) -> None:
        # What a capture made stays alive: the graph reads a tensor that the model has rebound by its address.
        self._backend.synchronize()
        made = self._snapshot.live().values()
        self._kept |= {id(tensor): tensor for tensor in made if id(tensor) not in self._held}
        self._snapshot.restore()
        self._backend.set_rng_state(self._rng)

    def assert_unchanged(self) -> None:
        """Raise :class:`~pytest_cudagraph.errors.CudagraphError` naming what is not as before."""
        changes = self._snapshot.changes()
        left = [*changes.written, *changes.rebound, *changes.added, *changes.removed, *changes.python]
        left += changes.training
        before, after = pytree.tensors_in(self._rng), pytree.tensors_in(self._backend.rng_state())
        if not all(torch.equal(one, other) for one, other in zip(before, after, strict=True)):
            left.append("the random generators")
        if left:
            raise CudagraphError(
                f"warm-up and capture must leave the model as it was, and could not bring back: {', '.join(left)}"
            )
