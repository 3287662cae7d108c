"""Time that passes only when a test says so."""

from __future__ import annotations


class FakeClock:
    """``cost_ns`` is what a reading itself takes."""

    def __init__(self, resolution_ns=1.0, cost_ns=0):
        self.resolution_ns = resolution_ns
        self.time_ns = 0.0
        self.cost_ns = cost_ns

    def now_ns(self) -> int:
        self.time_ns += self.cost_ns
        return round(self.time_ns)

    def cpu_time_ns(self) -> int:
        """Nothing waits."""
        return round(self.time_ns)
