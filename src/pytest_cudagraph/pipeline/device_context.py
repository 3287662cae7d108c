"""What all runs on one device share: the backend, the saved entries, the clock and the reference workload."""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from pytest_cudagraph import device
from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.baseline import (
    NO_FIGURES,
    AnyPath,
    JsonStore,
    RemotePath,
    age,
    figure_changes,
    json_files,
    latency_change,
    read,
    session_of,
)
from pytest_cudagraph.errors import BaselineError, CudagraphError
from pytest_cudagraph.foreign import without_credentials
from pytest_cudagraph.measure import PerfCounterClock, measure_arms
from pytest_cudagraph.protocols import Backend, CapturedGraph, Clock, GraphPool
from pytest_cudagraph.settings.options import Settings
from pytest_cudagraph.stats import summaries
from pytest_cudagraph.values import DeviceInfo, Latency, MeasuredBatch, NoBaseline, Receipt, SavedBatch, Timing

_SHARE = 0.1
"""The largest part of a measurement's time that readings take."""

_MOST_AT_ONCE = 16
_FEWEST = 10
"""Readings. Fewer give no quartile."""

_INTERRUPTED = 4
"""Times the shortest reading. A longer reading was interrupted, and only this much of it counts as time spent.

Otherwise one interruption of 40 ms would use up the share of a measurement that needs its readings.
"""

_WARM_CALLS = 3
_ROUNDS = 10
"""Five operations each: 50 kernels, like a small model."""

_SIDE = 32
"""A 32 x 32 matrix: microseconds per operation, and below what torch splits among threads (32768 elements)."""


class Reference:
    """The reference workload of one device. It is captured at the first use and kept for the run."""

    def __init__(self, backend: Backend, clock: Clock) -> None:
        self._backend, self._clock = backend, clock
        self._pool: GraphPool | None = None
        self._graph: CapturedGraph | None = None
        self._is_refused = False

    def readings(self) -> Readings:
        """Readings for one measurement. The first call captures the workload and warms it up."""
        if self._graph is None and not self._is_refused:
            # A refusal must not fail a test: latencies are then compared undivided.
            with contextlib.suppress(CudagraphError, RuntimeError):
                self._graph = self._capture()
            self._is_refused = self._graph is None
        return Readings(self._sample_ns)

    def _sample_ns(self) -> float | None:
        return None if self._graph is None else self._timed_ns(self._graph)

    def _timed_ns(self, graph: CapturedGraph) -> float:
        synchronize, now_ns = self._backend.synchronize, self._clock.now_ns
        synchronize()
        start_ns = now_ns()
        graph.replay()
        synchronize()
        return max(now_ns() - start_ns, self._clock.resolution_ns, 1.0)

    def _capture(self) -> CapturedGraph:
        # float64: the precision of float32 products is a setting of the process.
        device = self._backend.device
        values = torch.linspace(-1.0, 1.0, _SIDE * _SIDE, dtype=torch.float64, device=device).reshape(_SIDE, _SIDE)
        with self._backend.running(), torch.autocast(torch.device(device).type, enabled=False):
            self._pool = self._backend.pool()
            graph = self._pool.capture(reference_workload, (values,), {}, batch_size=_SIDE)
        for _ in range(_WARM_CALLS):
            graph.replay()
        return graph


class Readings:
    """Readings of the reference between the blocks of one measurement. A slow machine slows both."""

    def __init__(self, sample_ns: Callable[[], float | None]) -> None:
        self._sample_ns = sample_ns
        self._samples_ns: list[float] = []
        self._spent_ns, self._least_ns = 0.0, math.inf

    def keep_up(self, elapsed_ns: float) -> None:
        """Read until the share of the measurement's time is spent, at most 16 times per call."""
        for _ in range(_MOST_AT_ONCE):
            if self._spent_ns > elapsed_ns * _SHARE:
                return
            sample_ns = self._sample_ns()
            if sample_ns is None:
                return
            self._samples_ns.append(sample_ns)
            self._least_ns = min(self._least_ns, sample_ns)
            self._spent_ns += min(sample_ns, _INTERRUPTED * self._least_ns)

    def latency(self) -> Latency | None:
        """The distribution of the readings. None with fewer than 10."""
        return summaries.latency_summary(self._samples_ns) if len(self._samples_ns) >= _FEWEST else None


def reference_workload(values: torch.Tensor) -> torch.Tensor:
    """Products, comparisons, reductions and sums. No tanh: CPU libraries run even a small one in threads."""
    matrix = values
    for _ in range(_ROUNDS):
        matrix = (matrix @ values).clamp(-1.0, 1.0)
        matrix = matrix - matrix.mean(dim=0) + values
    return matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceContext:
    """An opened device, what is saved of it, and how it is measured."""

    backend: Backend
    device: DeviceInfo
    why_not_judged: str
    """Why speed is not judged on this device. Empty where it is."""
    saved: Mapping[tuple[str, int], SavedBatch]
    elsewhere: Sequence[SavedBatch]
    """Entries of other devices' files. They are not compared, and the report says so."""
    baseline_file: AnyPath
    clock: Clock
    replaces: bool = False
    """Whether this run replaces saved entries on request. Then no gate compares with them."""
    saves: bool = False
    """Whether this run saves entries that do not exist yet."""
    uses_baseline: bool = True
    """False with ``--cudagraph-baseline=off``."""
    update_option: str = "--cudagraph-update"
    """The option that saves an entry on this device."""
    is_strict: bool = False
    """Whether a missing entry is a lack (``--cudagraph-strict``)."""
    reference: Reference | None = None
    """The workload that latencies are divided by before they are compared with other sessions."""
    waiting_processes: int = 0
    """Processes that hold the device and wait for this one. The driver lists them, and they disturb nothing."""
    measure: Callable[..., Timing] = measure_arms
    """Measures the arms; see :func:`pytest_cudagraph.measure_arms`."""

    @contextlib.contextmanager
    def using_its_threads(self) -> Iterator[None]:
        """Let torch use the threads of this device's description, on the CPU twin. On a GPU they decide nothing."""
        before = torch.get_num_threads()
        if self.device.kind != "cpu" or before == self.device.threads:
            yield
            return
        torch.set_num_threads(self.device.threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def find_saved(self, name: str, batch_size: int) -> SavedBatch | NoBaseline:
        """The saved entry of this device. Without one, whether another device's file has it."""
        if not self.uses_baseline:
            return NoBaseline(comparison="off", reason="no baseline is used")
        entry = self.saved.get((name, batch_size))
        if entry is not None:
            return entry
        others = [entry for entry in self.elsewhere if (entry.name, entry.batch_size) == (name, batch_size)]
        if others:
            names = ", ".join(sorted({entry.device.name for entry in others}))
            reason = f"the baseline is of {names}; this run is on {self.device.name}"
            comparison: Literal["new", "not-comparable"] = "new" if self.saves else "not-comparable"
            return NoBaseline(comparison=comparison, reason=reason)
        file = f"{self.baseline_file.parent.name}/{self.baseline_file.name}"
        asked_for = self.is_strict and not self.saves
        return NoBaseline(comparison="new", reason=f"no entry in {file} yet", asked_for=asked_for)

    def newest_count(self, name: str, batch_size: int) -> SavedBatch | None:
        """The newest entry whose kernel count holds here: every CPU runs the same operations of the twin.

        A GPU chooses kernels by its model. So a GPU has none.
        """
        entries = (*self.elsewhere, *self.saved.values())
        alike = [
            entry
            for entry in entries
            if (entry.name, entry.batch_size) == (name, batch_size) and entry.device.kind == self.device.kind == "cpu"
        ]
        return max(alike, key=age, default=None)

    def measured_batch(
        self, name: str, batch_size: int, timing: Timing, receipt: Receipt, figures: Mapping[str, Latency] = NO_FIGURES
    ) -> MeasuredBatch:
        """A measurement with what is saved of the same test, compared once for all gates."""
        saved = self.find_saved(name, batch_size)
        change, changes = latency_change(saved, timing, self.device), {}
        if change is not None and isinstance(saved, SavedBatch):
            changes = figure_changes(saved, session_of(timing, self.device, figures=figures))
        return MeasuredBatch(
            timing=timing,
            receipt=receipt,
            device=self.device,
            saved=saved,
            counted=self.newest_count(name, batch_size),
            change=change,
            figure_changes=changes,
            replaces_saved=self.replaces,
            why_not_judged=self.why_not_judged,
            update_option=self.update_option,
        )


def open_device_context(
    option: str, settings: Settings, other: Callable[[], tuple[Backend, DeviceInfo]] | None = None
) -> DeviceContext:
    """Open the device of ``--cudagraph-device`` (or of a marker) and read its baseline file.

    ``other`` opens a device that another plugin brings. Raises :class:`~pytest_cudagraph.errors.DeviceUnavailable` and
    :class:`~pytest_cudagraph.errors.BaselineError`.
    """
    if other is None:
        choice = device.choose(option, require_gpu=settings.require_gpu)
        described, backend = device.describe(choice.kind), open_backend(choice.kind)
    else:
        backend, described = other()
        choice = device.Choice(kind=described.kind, judged=True, reason=f"{option} was requested")
    if choice.kind == "cpu":
        described = replace(described, threads=settings.threads)
    store = JsonStore(settings.baseline_folder, described)
    reads = settings.enabled and settings.uses_baseline
    if reads and isinstance(store.path, RemotePath):
        store.path.parent.require(may_create=settings.update != "never")
    why_not_judged, clock = _why_not_judged(choice, settings), PerfCounterClock()
    return DeviceContext(
        backend=backend,
        device=described,
        why_not_judged=why_not_judged,
        saved=store.load() if reads else {},
        elsewhere=_elsewhere(store.path) if reads else (),
        baseline_file=store.path,
        clock=clock,
        reference=Reference(backend, clock),
        # What is not judged is not written. It replaces nothing.
        replaces=not why_not_judged and settings.update in ("changed", "all"),
        saves=not why_not_judged and settings.update != "never",
        update_option=_update_option(choice, settings),
        is_strict=settings.strict,
        uses_baseline=settings.uses_baseline,
        waiting_processes=_waiting_processes(settings),
    )


def _why_not_judged(choice: device.Choice, settings: Settings) -> str:
    if settings.sample is not None:
        return "this process only measures, for a comparison of revisions"
    if choice.kind == "cuda" and settings.why_shared:
        return settings.why_shared
    if _is_shared(choice, settings):
        # Tests of other workers run at the same moment on the same cores and the same GPU.
        return f"{settings.workers} xdist workers share this machine; run without -n to judge speed"
    return "" if choice.judged else choice.reason


def _is_shared(choice: device.Choice, settings: Settings) -> bool:
    return settings.workers > 1 and not (settings.has_own_gpu and choice.kind == "cuda")


def _update_option(choice: device.Choice, settings: Settings) -> str:
    without = " without -n" if _is_shared(choice, settings) else ""
    option = "--cudagraph-update"
    if settings.baseline not in (".cudagraph", "off"):
        option = f"--cudagraph-baseline={shlex.quote(without_credentials(settings.baseline))} {option}"
    if choice.kind == "cpu":
        return f"--cudagraph-device=cpu {option}{without}"
    return f"{option}{without}{'' if choice.judged else ' on a GPU'}"


def _waiting_processes(settings: Settings) -> int:
    """Processes that opened the device and wait: the one that compares revisions, and xdist's controller."""
    is_controlled = settings.workers > 0 and (settings.require_gpu or settings.device == "cuda")
    return int(settings.sample is not None) + int(is_controlled)


def _elsewhere(own_path: AnyPath) -> tuple[SavedBatch, ...]:
    """The entries of other devices' files. A file that cannot be read is reported by runs on its own device."""
    entries: list[SavedBatch] = []
    for path in json_files(own_path.parent):
        if path != own_path:
            with contextlib.suppress(BaselineError):
                entries += read(path).entries.values()
    return tuple(entries)
