"""Models whose Python values move with each call and decide in a later one, and look-alikes that compute the same.

Each hazard names the value that moves, from which call on a replay is wrong, and whether the product fails it
(``wrong``) or only tells what it did not judge (``told``).
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.conformance.cases import Base, Case, Expected, from_class

LATER: dict[str, LaterCase] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterCase:
    """One model. ``wrong_from`` is the first call whose replay is wrong, and None for a look-alike."""

    name: str
    case: Case
    moves: str
    wrong_from: int | None
    seen: str

    @property
    def is_hazard(self):
        return self.wrong_from is not None


class Late(Base):
    """A linear layer times what ``scale`` gives."""

    def forward(self, x):
        return self.linear(x) * self.scale()


def later(moves, wrong_from, seen):
    """Register a model that is right at first."""
    return _registering(moves, wrong_from, seen)


def alike(moves):
    """Register a model whose values move, and whose result never depends on them."""
    return _registering(moves, None, "")


def _registering(moves, wrong_from, seen):
    def register(cls):
        assert cls.__name__ not in LATER, f"two models are called {cls.__name__}"
        case = Case(name=cls.__name__, build=from_class(cls), expected=Expected(), source=cls)
        LATER[cls.__name__] = LaterCase(name=cls.__name__, case=case, moves=moves, wrong_from=wrong_from, seen=seen)
        return cls

    return register
