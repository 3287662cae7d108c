"""Blocks that wait for a clean bill of health before they count: a throttled or shared device proves nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

Vet = Callable[[], str]
"""Says what has disturbed the device since it was last asked, empty if nothing did; never asked in a timed interval."""

_PERIOD_NS = 50_000_000
"""Asking takes about a millisecond per GPU: a fiftieth of the time."""


@dataclass(slots=True, kw_only=True)
class Vetting:
    """Asks now and then, and tells how many of the blocks taken since the last time to throw away."""

    vet: Vet | None = None
    discarded: int = 0
    reasons: dict[str, None] = field(default_factory=dict)  # a set that keeps its order
    _asked_ns: float = 0.0

    def is_due(self, elapsed_ns: float) -> bool:
        """Whether the blocks that wait can be decided on: at once where nobody vets them."""
        return self.vet is None or elapsed_ns - self._asked_ns >= _PERIOD_NS

    def passes(self, waiting: int, elapsed_ns: float) -> bool:
        """Whether the blocks that wait count; those that do not are counted here, with the reason."""
        self._asked_ns = elapsed_ns
        found = self.vet() if self.vet is not None else ""
        if found:
            self.discarded += waiting
            self.reasons[found] = None
        return not found
