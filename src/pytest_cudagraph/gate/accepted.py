"""What an update accepts in place of a saved entry, in words."""

from __future__ import annotations

import math
from dataclasses import replace

from pytest_cudagraph import baseline
from pytest_cudagraph.gate.latency import FIGURES
from pytest_cudagraph.gate.wording import change_text, changes_text
from pytest_cudagraph.units import plural, signed_text
from pytest_cudagraph.values import LatencyChange, SavedBatch

_ALIKE_LOG = 0.005
"""With a smaller difference, the change is shown without the reference workload."""


def replaced_text(saved: SavedBatch, new: SavedBatch) -> str:
    """``replay 56.7 -> 243.9 µs (+330 %), 32 -> 62 kernels``. Empty if neither changed, as after an upgrade.

    A latency has changed if it does not continue the saved history (:func:`pytest_cudagraph.baseline.is_continued`).
    """
    hardware = saved.device.hardware_changes(new.device)
    if hardware:
        return f"other hardware: {', '.join(hardware)}"
    change = baseline.change(saved, new.sessions[-1])
    kernels = _kernels_text(saved, new)
    alike = {name: getattr(saved, name) for name in ("kernels", "kernel_names", "device", "compiled")}
    has_moved = not baseline.is_continued(saved, replace(new, **alike))
    texts = [f"{_latency_text(change)}{kernels}"] if has_moved or kernels else []
    texts += [_latency_text(each, FIGURES.get(name, name)) for name, each in baseline.moved_figures(saved, new).items()]
    return ", ".join(texts)


def _latency_text(change: LatencyChange, subject: str = "replay") -> str:
    raw = change.after_ns / change.before_ns
    moved = signed_text(raw)
    if abs(math.log(raw) - change.log_ratio) > _ALIKE_LOG:
        moved += f"; {signed_text(math.exp(change.log_ratio))} relative to the reference workload"
    # Tables show medians. Another statistic is named, because the two may differ.
    named = "" if change.what == "median" else f"{change.what} "
    return f"{subject} {named}{change_text(change.before_ns, change.after_ns)} ({moved})"


def _kernels_text(saved: SavedBatch, new: SavedBatch) -> str:
    if saved.kernels is None or new.kernels is None:
        return ""
    if saved.kernels != new.kernels:
        return f", {saved.kernels} -> {plural(new.kernels, 'kernel')}"
    changed = changes_text(saved.kernel_names, new.kernel_names)
    return f", other kernels: {changed}" if changed else ""
