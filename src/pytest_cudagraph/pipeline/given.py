"""The arguments of a timed call, in containers of their own."""

from __future__ import annotations

from typing import Any

from pytest_cudagraph import leaves
from pytest_cudagraph.inputs import Example


class Given:
    """An example's own tensors, in dicts and lists made anew: what a model adds to them or takes out stays in them."""

    def __init__(self, example: Example) -> None:
        self._example = example
        self.is_changed = False
        """Whether a call was seen to leave the containers other than it found them."""
        self.args: tuple[Any, ...]
        self.kwargs: dict[str, Any]
        self.renew()

    def renew(self) -> None:
        """The containers as they were before any call."""
        self.args, self.kwargs = leaves.map_tensors(lambda tensor: tensor, (self._example.args, self._example.kwargs))

    def look(self) -> bool:
        """Whether the calls since the last :meth:`renew` have changed the containers; they are made anew if so."""
        before, structure = leaves.flatten((self._example.args, self._example.kwargs))
        now, structure_now = leaves.flatten((self.args, self.kwargs))
        same = structure == structure_now and all(one is other for one, other in zip(before, now, strict=True))
        self.is_changed = not same
        if self.is_changed:
            self.renew()
        return self.is_changed
