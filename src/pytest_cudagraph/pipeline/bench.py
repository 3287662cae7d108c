"""What every story of one device shares: its backend, what is known of it, what was saved of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pytest_cudagraph import device
from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.baseline import JsonStore, read
from pytest_cudagraph.errors import BaselineError
from pytest_cudagraph.measure import PerfCounterClock
from pytest_cudagraph.pipeline.reference import Reference
from pytest_cudagraph.protocols import Backend, Clock
from pytest_cudagraph.settings import Settings
from pytest_cudagraph.values import DeviceInfo, NoBaseline, SavedBatch

Progress = Callable[[str], None]
"""Tells a reader what is going on; does nothing where nobody watches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """An opened device. ``judged`` is whether its speed counts; if not, ``why_not`` says why."""

    backend: Backend
    device: DeviceInfo
    judged: bool
    why_not: str
    saved: Mapping[tuple[str, int], SavedBatch]
    elsewhere: Sequence[SavedBatch]
    """Entries of other devices' files: they are not compared, and the report says so."""
    baseline_file: Path
    clock: Clock
    replaces: bool = False
    """Whether saved entries are being replaced on request, and so hold nobody back."""
    saves: bool = False
    """Whether what is not saved yet will be, by this very run."""
    update_option: str = "--cudagraph-update"
    """What has to be asked for, for an entry to be written where this run measures."""
    is_strict: bool = False
    reference: Reference | None = None
    """What latencies are divided by before they are held against other sessions'."""
    waiting_processes: int = 0
    """Those that hold the device and wait for this one: no neighbours, although the driver lists them."""

    def find_saved(self, name: str, batch_size: int) -> SavedBatch | NoBaseline:
        """The saved entry of this device; else what the file lacks, or that another device's file has it."""
        found = self.saved.get((name, batch_size))
        if found is not None:
            return found
        others = [entry for entry in self.elsewhere if (entry.name, entry.batch_size) == (name, batch_size)]
        if others:
            names = ", ".join(sorted({entry.device.name for entry in others}))
            reason = f"the baseline is of {names}; this run is on {self.device.name}"
            comparison: Literal["new", "not-comparable"] = "new" if self.saves else "not-comparable"
            return NoBaseline(comparison=comparison, reason=reason, counted=self._counted(others))
        file = f"{self.baseline_file.parent.name}/{self.baseline_file.name}"
        asked_for = self.is_strict and not self.saves
        return NoBaseline(comparison="new", reason=f"no entry in {file} yet", asked_for=asked_for)

    def _counted(self, others: Sequence[SavedBatch]) -> SavedBatch | None:
        """The last saved of these whose kernels are countable here too: any CPU runs the twin's operations, and a GPU
        chooses kernels by its model."""
        alike = [entry for entry in others if entry.device.kind == self.device.kind == "cpu"]
        return max(alike, key=lambda entry: entry.saved_at, default=None)

    def held_to(self, name: str, batch_size: int) -> SavedBatch | NoBaseline:
        """The saved entry; where it is about to be replaced on request, nothing to be held to."""
        saved = self.find_saved(name, batch_size)
        if self.replaces and isinstance(saved, SavedBatch):
            return NoBaseline(comparison="off", reason="the saved entry is being replaced (--cudagraph-update)")
        return saved


def open_bench(option: str, settings: Settings) -> Bench:
    """Open the device of ``--cudagraph-device`` (or of a marker) and read its baseline file.

    Raises :class:`~pytest_cudagraph.errors.DeviceUnavailable` and
    :class:`~pytest_cudagraph.errors.BaselineError`.
    """
    choice = device.choose(option, require_gpu=settings.require_gpu)
    described = device.describe(choice.kind)
    store = JsonStore(settings.baseline_folder, described)
    judged, why_not = choice.judged, choice.reason
    if settings.workers > 1:
        # Other workers' tests run at the same moment on the same cores and the same GPU.
        judged, why_not = False, f"{settings.workers} xdist workers share this machine; run without -n to judge speed"
    if settings.sample is not None:
        judged, why_not = False, "this process only measures, for a comparison of revisions"
    backend, clock = open_backend(choice.kind), PerfCounterClock()
    return Bench(
        backend=backend,
        device=described,
        judged=judged,
        why_not="" if judged else why_not,
        saved=store.load() if settings.enabled else {},
        elsewhere=_elsewhere(store.path) if settings.enabled else (),
        baseline_file=store.path,
        clock=clock,
        reference=Reference(backend, clock),
        # What is not judged is not written, and so replaces nothing.
        replaces=judged and settings.update in ("changed", "all"),
        saves=judged and settings.update != "never",
        update_option=_update_option(choice, settings),
        is_strict=settings.strict,
        waiting_processes=_waiting_processes(settings),
    )


def _update_option(choice: device.Choice, settings: Settings) -> str:
    of_rehearsal = "" if choice.judged else "--cudagraph-device=cpu "
    return f"{of_rehearsal}--cudagraph-update{' without -n' if settings.workers > 1 else ''}"


def _waiting_processes(settings: Settings) -> int:
    """Who has opened the device to see that it is there, and waits: whoever compares revisions, xdist's controller."""
    is_controlled = settings.workers > 0 and (settings.require_gpu or settings.device == "cuda")
    return int(settings.sample is not None) + int(is_controlled)


def _elsewhere(own: Path) -> tuple[SavedBatch, ...]:
    """What other devices' files hold; one that cannot be read concerns the runs on its device, not this one."""
    found: list[SavedBatch] = []
    for path in sorted(own.parent.glob("*.json")):
        if path != own:
            with contextlib.suppress(BaselineError):
                found += read(path).entries.values()
    return tuple(found)
