"""What an update accepts: an entry that is replaced, beside the one that was saved."""

from __future__ import annotations

import math
from dataclasses import replace

from pytest_cudagraph import baseline as baselines
from pytest_cudagraph.baseline import Change
from pytest_cudagraph.gate.structure import changes_text
from pytest_cudagraph.gate.wording import change_text, signed_text
from pytest_cudagraph.units import plural
from pytest_cudagraph.values import SavedBatch

_ALIKE_LOG = 0.005
"""A change that the reference workload moves by less reads the same with it and without."""


def replaced_text(saved: SavedBatch, new: SavedBatch) -> str:
    """``replay 56.7 -> 243.9 µs (+330 %), 32 -> 62 kernels``; empty where neither has moved, as after an upgrade.

    Moved is a latency that does not go on what is saved (:func:`pytest_cudagraph.baseline.is_continued`).
    """
    hardware = saved.device.hardware_changes(new.device)
    if hardware:
        return f"other hardware: {', '.join(hardware)}"
    change = baselines.change(saved, baselines.history(new)[-1])
    kernels = _kernels_text(saved, new)
    alike = {name: getattr(saved, name) for name in ("kernels", "kernel_names", "device", "compiled")}
    has_moved = not baselines.is_continued(saved, replace(new, **alike))
    return f"{_latency_text(change)}{kernels}" if has_moved or kernels else ""


def _latency_text(change: Change) -> str:
    raw = change.after_ns / change.before_ns
    moved = signed_text(raw)
    if abs(math.log(raw) - change.log_ratio) > _ALIKE_LOG:
        moved += f"; {signed_text(math.exp(change.log_ratio))} relative to the reference workload"
    # Tables show medians: of another statistic the name is said, for the two may move apart.
    named = "" if change.what == "median" else f"{change.what} "
    return f"replay {named}{change_text(change.before_ns, change.after_ns)} ({moved})"


def _kernels_text(saved: SavedBatch, new: SavedBatch) -> str:
    if saved.kernels is None or new.kernels is None:
        return ""
    if saved.kernels != new.kernels:
        return f", {saved.kernels} -> {plural(new.kernels, 'kernel')}"
    changed = changes_text(saved.kernel_names, new.kernel_names)
    return f", other kernels: {changed}" if changed else ""
