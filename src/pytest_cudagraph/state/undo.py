"""Save the state of a model before the captures, and undo what warm-up and capture change, at each batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from pytest_cudagraph import pytree
from pytest_cudagraph.errors import CudagraphError
from pytest_cudagraph.protocols import Backend, Model
from pytest_cudagraph.state.snapshot import NO_CONSTANTS, Changes, Constants, Extras, Snapshot


class SizeStates:
    """Where each batch size has tensors of its own, such as a cache: the state that a first call at a size leaves.

    A graph is captured after such a call, and reads its tensors. These states keep them alive.
    """

    def __init__(self, before: Snapshot) -> None:
        self._before = before
        self._after: dict[int, Snapshot] = {}
        self._made: dict[int, tuple[str, ...]] = {}
        self._changed: set[str] = set()

    def is_made(self) -> bool:
        """Whether calls until now have made tensors of the model anew."""
        return _is_made(self._before.changes(values=False))

    def learn(self, size: int, call: Callable[[], object]) -> bool:
        """Call twice at this batch size. Whether the first call makes tensors anew and the second does not: a cache.

        Then the model is left in the state between them. Memory from before keeps its values.
        """
        before, rewind = self._before, self._before.rewinder()
        call()
        rewind()
        changes, after = before.changes(values=False), before.taken_again()
        call()
        if not _is_made(changes) or _is_made(after.changes(values=False)):
            before.restore()  # what these calls made is of no graph
            return False
        after.restore()
        self._after[size], self._made[size] = after, (*changes.rebound, *changes.added)
        self._changed |= _names(changes)
        return True

    def __bool__(self) -> bool:
        return bool(self._after)

    def at(self, size: int) -> Snapshot:
        """The state from which the graph of a batch size was captured."""
        return self._after.get(size, self._before)

    def made_at(self, size: int) -> tuple[str, ...]:
        """The tensors that a first call at this size makes anew, by name."""
        return self._made.get(size, ())

    def is_current(self) -> bool:
        """Whether the model still is as at the captures, but for what a first call at a size changes."""
        return bool(self) and _names(self._before.changes(values=False)) <= self._changed


def _is_made(changes: Changes) -> bool:
    return bool(changes.rebound or changes.added)


def _names(changes: Changes) -> set[str]:
    return {name.partition(": ")[0] for name in changes.names}


class Undo:
    """Saves the state of a model and the random generators, and undoes what warm-up and capture change.

    ``extras`` are opaque inputs, such as a cache. Release this object after the captures: it holds a copy of the state.
    """

    def __init__(
        self, model: Model, backend: Backend, *, extras: Extras = (), constants: Constants = NO_CONSTANTS
    ) -> None:
        self._backend = backend
        self._constants = constants.renewed()
        self._snapshot = Snapshot.take(model, extras=extras, constants=constants)
        self.size_states = SizeStates(self._snapshot)
        self._rng: Any = backend.rng_state(model, extras)
        held = self._snapshot.live()
        # Not the parameters: to copy all weights after each warm-up would take long.
        moving = [name for name, tensor in held.items() if not isinstance(tensor, nn.Parameter)]
        self._rewind = self._snapshot.rewinder(moving)
        self.addresses = {name: tensor.data_ptr() for name, tensor in held.items()}
        self._held = {id(tensor): tensor for tensor in held.values()}
        self._kept: dict[int, torch.Tensor] = {}
        self._replaced: dict[int, torch.Tensor] = {}

    @property
    def kept(self) -> tuple[torch.Tensor, ...]:
        """State that was made inside :meth:`undone` and removed from the model. A graph may read its address."""
        return tuple(self._kept.values())

    @property
    def replaced(self) -> tuple[torch.Tensor, ...]:
        """State that a call inside :meth:`undone` replaced. A graph may read its address, and eager may free it."""
        return tuple(self._replaced.values())

    def random_state(self) -> Any:
        """The present states of the random generators that are restored."""
        generators = [leaf for leaf in pytree.flatten(self._rng)[0] if isinstance(leaf, torch.Generator)]
        return self._backend.rng_state(*generators)

    def written(self) -> dict[str, torch.Tensor]:
        """Copies of the state that was changed in place, by name."""
        live = self._snapshot.live()
        return {name: live[name].clone() for name in self._snapshot.changes().written if name in live}

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Restore everything on exit, also after an error."""
        try:
            yield
        except BaseException:
            # After an error the device may refuse the restore too. The first error is the one to report.
            with suppress(RuntimeError):
                self._restore()
            raise
        self._restore()

    def _restore(self) -> None:
        # Keep what a capture made: the graph reads a rebound tensor by its address.
        self._backend.synchronize()
        now = {id(tensor): tensor for tensor in self._snapshot.live().values()}
        self._kept |= {key: tensor for key, tensor in now.items() if key not in self._held}
        self._replaced |= {key: tensor for key, tensor in self._held.items() if key not in now}
        self._snapshot.restore()
        self._backend.set_rng_state(self._rng)

    def rewind(self) -> None:
        """Let the next warm-up or the capture find the values that the first one found, and what that one made."""
        self._rewind()

    def assert_unchanged(self) -> None:
        """Raise :class:`~pytest_cudagraph.errors.CudagraphError` naming what was not restored."""
        left = [*self._snapshot.changes().names, *self._constants.changed()]
        if not pytree.has_same_tensors(self._rng, self.random_state()):
            left.append("the random generators")
        if left:
            raise CudagraphError(
                f"warm-up and capture must not change the model, but could not restore: {', '.join(left)}"
            )
