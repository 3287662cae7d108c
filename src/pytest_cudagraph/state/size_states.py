"""The state after a first call at a batch size, of a model that makes tensors anew when the size changes."""

from __future__ import annotations

from collections.abc import Callable

from pytest_cudagraph.state.snapshot import Changes, Snapshot


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
