"""What a measurement is held against: earlier sessions, another revision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pytest_cudagraph.values.machine import DeviceInfo
from pytest_cudagraph.values.timings import Interval, Latency

Comparison = Literal["same", "faster", "slower", "uncertain", "new", "not-comparable", "off"]
"""A measurement beside the saved baseline; ``off``: no comparison was wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What one recorded run found of a replay: a baseline keeps some, to know how far unchanged runs differ."""

    date: str
    commit: str
    """Short; empty outside of a repository."""
    software: str
    """See :attr:`DeviceInfo.software`."""
    q25_ns: float
    median_ns: float
    reference_q25_ns: float | None = None
    """The reference workload of that run, to divide by like with like; see :attr:`Timing.reference`."""
    reference_median_ns: float | None = None
    unrest_log: float = 0.0
    """How much further apart than on a machine at rest the quartiles lay, of reference or replay, as a log-ratio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBatch:
    """What a baseline file holds of one test at one batch size."""

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
    sessions: tuple[Session, ...] = ()
    """The runs that found these kernels at this speed, oldest first; the latencies above are of one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoBaseline:
    """That there is nothing to compare with, and why."""

    comparison: Literal["new", "not-comparable", "off"]
    reason: str
    asked_for: bool = False
    """Whether the run demands a saved entry (``--cudagraph-strict``): its lack is then no pass."""
    counted: SavedBatch | None = None
    """Another device's entry: its latencies are not comparable, its kernels are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseComparison:
    """One test at one batch size in two revisions, a pair of processes after the other.

    Each figure is one process's lower quartile; the n-th of ``head`` and of ``base`` were measured next to each other.
    """

    revision: str
    base_replay_ns: tuple[float, ...] = ()
    head_replay_ns: tuple[float, ...] = ()
    base_eager_ns: tuple[float, ...] = ()
    head_eager_ns: tuple[float, ...] = ()
    base_reference_ns: tuple[float, ...] = ()
    head_reference_ns: tuple[float, ...] = ()
    """The reference workload beside each of them; empty where a process has none."""
    base_kernels: int | None = None
    head_kernels: int | None = None
    change: Interval | None = None
    """Head's replay over base's: what was judged; None where there is nothing to compare."""
    missing: str = ""
    """Why there is nothing to compare, in a few words; empty where there is."""
    why: str = ""
    """What the test said where it could not be measured: the first line of its error, or why it was skipped."""
