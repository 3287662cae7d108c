"""A measurement and what it is compared with: saved sessions, another revision."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pytest_cudagraph.values.evidence import Receipt
from pytest_cudagraph.values.timings import DeviceInfo, Interval, Latency, Timing

Comparison = Literal["same", "faster", "slower", "uncertain", "new", "not-comparable", "off"]
"""A measurement beside the saved baseline; ``off``: no comparison was wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFigure:
    """A figure of one session beside the replay. Larger is slower."""

    q25_ns: float
    median_ns: float
    unrest_log: float = 0.0
    """As :attr:`Session.unrest_log`, of this figure's own samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One recorded run of a replay. A baseline keeps some, to know how much unchanged runs differ."""

    date: str
    commit: str
    """Short. Empty outside a repository."""
    software: str
    """See :attr:`DeviceInfo.software`."""
    q25_ns: float
    median_ns: float
    reference_q25_ns: float | None = None
    """The lower quartile of that run's reference workload; see :attr:`Timing.reference`."""
    reference_median_ns: float | None = None
    unrest_log: float = 0.0
    """How much wider the quartiles of reference or replay were than on an idle machine, as a log-ratio."""
    figures: Mapping[str, SavedFigure] = field(default_factory=dict, hash=False)
    """Of a generation: ``itl``, ``time_per_token``, ``ttft``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBatch:
    """The entry of one test at one batch size in a baseline file."""

    name: str
    batch_size: int
    eager: Latency
    replay: Latency
    compiled: Latency | None
    speedup: Interval
    kernels: int | None
    kernel_names: Mapping[str, int]
    device: DeviceInfo
    saved_at: str
    sessions: tuple[Session, ...]
    """The runs with these kernels at this speed, oldest first. The latencies above are of one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoBaseline:
    """Why there is no entry to compare with."""

    comparison: Literal["new", "not-comparable", "off"]
    reason: str
    asked_for: bool = False
    """Whether the run requires an entry (``--cudagraph-strict``). Without one it is then not judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyChange:
    """One replay compared with the sessions of an entry, and how far an unchanged replay could be from them."""

    what: str
    """The statistic: ``median``, or ``lower quartile`` where that moved less."""
    before_ns: float
    """Geometric mean of the sessions."""
    after_ns: float
    log_ratio: float
    """After over before, divided by the reference workload's ratio where ``reference_ns`` is given.

    On a busy machine it is the smaller of the divided and the undivided change, because a slowdown shows in both.
    """
    margin_log: float
    """Half of the 90 % prediction interval: each bound holds for 95 % of unchanged sessions."""
    spread: float
    """The standard deviation between sessions from which the margin is computed."""
    sessions: int
    is_prior: bool
    """Whether the spread is assumed, because there are too few sessions to estimate it."""
    unrest_log: float = 0.0
    """The part of the margin for other work on the machine, now and when the sessions were saved."""
    apart_log: float = 0.0
    """How much larger ``log_ratio`` is in the reading that was not used. That reading is not ruled out."""
    reference_ns: tuple[float, float] | None = None
    """The reference workload before (geometric mean) and after. None where latencies were not divided."""

    @property
    def high_log(self) -> float:
        """The upper end of the interval."""
        return self.log_ratio + self.apart_log + self.margin_log

    @property
    def low_log(self) -> float:
        """The lower end."""
        return self.log_ratio - self.margin_log

    @property
    def unchanged_ns(self) -> tuple[float, float]:
        """Where a session of unchanged code would lie on the machine as it is now, in 90 of 100 cases."""
        expected_ns = self.after_ns * math.exp(-self.log_ratio)
        return expected_ns * math.exp(-self.margin_log - self.apart_log), expected_ns * math.exp(self.margin_log)

    def comparison(self, max_slowdown: float) -> Comparison:
        """``slower`` or ``same`` when the whole interval is above or within ``max_slowdown``, else ``uncertain``.

        Under the assumed spread a change of up to half of ``max_slowdown`` is ``same`` too, because the interval alone
        is wider than a tight gate. ``faster`` when the gain exceeds ``max_slowdown`` and the whole interval is a gain.
        """
        allowed_log = math.log1p(max_slowdown)
        if self.low_log > allowed_log:
            return "slower"
        is_small = self.is_prior and self.log_ratio + self.apart_log <= allowed_log / 2
        if self.high_log > allowed_log and not is_small:
            return "uncertain"
        return "faster" if -self.log_ratio > max(allowed_log, self.margin_log) else "same"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredBatch:
    """One batch size, measured: what the gates for structure, speedup and latency judge."""

    timing: Timing
    receipt: Receipt | None = None
    device: DeviceInfo | None = None
    saved: SavedBatch | NoBaseline = NoBaseline(comparison="off", reason="no baseline is used")
    counted: SavedBatch | None = None
    """The newest entry on the twin, of any CPU: its kernels are comparable, its latencies may not be."""
    change: LatencyChange | None = None
    """The replay compared with ``saved``. None without an entry of the same hardware."""
    figure_changes: Mapping[str, LatencyChange] = field(default_factory=dict)
    """The same for each figure of a generation that the entry has."""
    replaces_saved: bool = False
    """Whether the run replaces saved entries on request. Then no gate compares with them."""
    why_not_judged: str = ""
    """Why speed is not judged here. Empty where it is judged."""
    test: str = ""
    """The node id of the test."""
    update_option: str = "--cudagraph-update"
    """The option that saves an entry on this device."""

    @property
    def disturbance(self) -> str:
        """Why the device kept the measurement from a decision. Empty after a decision: it used undisturbed blocks."""
        return self.timing.disturbance if self.timing.decision == "open" else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseComparison:
    """One test at one batch size in two revisions, measured in pairs of processes.

    Each figure is one process's lower quartile. The n-th of ``head`` and the n-th of ``base`` are one pair.
    """

    revision: str
    base_replay_ns: tuple[float, ...] = ()
    head_replay_ns: tuple[float, ...] = ()
    base_eager_ns: tuple[float, ...] = ()
    head_eager_ns: tuple[float, ...] = ()
    base_reference_ns: tuple[float, ...] = ()
    head_reference_ns: tuple[float, ...] = ()
    """The reference workload in each process. Empty if a process has none."""
    base_kernels: int | None = None
    head_kernels: int | None = None
    change: Interval | None = None
    """Head's replay over base's, which is judged. None without a comparison."""
    missing: str = ""
    """Why there is no comparison. Empty if there is one."""
    why: str = ""
    """The first line of the test's error, or why it was skipped, if it was not measured."""
