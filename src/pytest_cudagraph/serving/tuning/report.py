"""What the tuner found: each cell with its place or its reason, the best, and the impact of the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_cudagraph.errors import ExpectationMissed
from pytest_cudagraph.foreign import printable
from pytest_cudagraph.serving import tuned_file
from pytest_cudagraph.serving.tuning.cells import TuningCell
from pytest_cudagraph.serving.tuning.impact import Impact
from pytest_cudagraph.serving.tuning.race import Place
from pytest_cudagraph.units import bytes_text, factor_text, latency_text, percent_text, plural, seconds_text, to_seconds
from pytest_cudagraph.values import DeviceInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCell:
    """One cell. Without a place it was not measured, and ``reason`` says why."""

    cell: TuningCell
    place: Place | None = None
    """Among the cells of its batch size."""
    latency_ns: float | None = None
    """Median, per call."""
    cost: float | None = None
    """By the objective; lower is better."""
    samples: int = 0
    memory_bytes: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningReport:
    """The result of one :func:`tune`. Without any measured cell ``best`` is None."""

    name: str
    device: DeviceInfo | None
    """None where nothing was measured, without ``--cudagraph``."""
    objective: str
    tolerance: float
    cells: tuple[MeasuredCell, ...]
    best: MeasuredCell | None
    is_best_decided: bool
    """Whether the best of all is, with confidence, not worse than any other by more than the tolerance."""
    impacts: tuple[Impact, ...] = ()
    noise_share: float = 0.0
    left_out: tuple[str, ...] = ()
    """Values of parameters that the impact leaves out, because a cell of theirs was not measured."""
    measure_ns: float = 0.0
    notes: tuple[str, ...] = field(default=())

    @property
    def best_of(self) -> dict[int, MeasuredCell]:
        """The best cell of each batch size that has one."""
        return {each.cell.batch_size: each for each in self.cells if each.place == "best"}

    def lines(self) -> list[str]:
        """The report as text, at most 100 columns where the reasons are short."""
        measured = [each for each in self.cells if each.place]
        samples = sum(each.samples for each in measured)
        measured_text = f"{len(measured)} measured in {seconds_text(self.measure_ns)}, {plural(samples, 'sample')}"
        lines = [
            f"{self.name}: {plural(len(self.cells), 'cell')}, {measured_text}, objective: {self.objective}",
            _TITLE,
        ]
        for each in self.cells:
            lines.append(self._row(each) if each.place else f"{_key(each.cell)}  not measured: {each.reason}")
        if self.best is not None:
            certain = "" if self.is_best_decided else f" (not proven within {percent_text(self.tolerance)})"
            lines.append(f"best: {self.best.cell}{certain}")
        lines += self._impact_lines()
        return [printable(line) for line in [*lines, *self.notes, *(f"to use: {text}" for text in self.usage())]]

    def _row(self, each: MeasuredCell) -> str:
        best = self.best_of[each.cell.batch_size]
        latency_ns, size = each.latency_ns or 0.0, each.cell.batch_size
        memory = "" if each.memory_bytes is None else bytes_text(each.memory_bytes)
        behind = factor_text((each.cost or 0.0) / (best.cost or 1.0))
        place = "best" if each.place == "best" else f"{each.place}, {behind} the best"
        return (
            f"{_key(each.cell)}{latency_text(latency_ns):>11}{latency_text(latency_ns / size):>11}{memory:>12}  {place}"
        )

    def _impact_lines(self) -> list[str]:
        if not self.impacts:
            return []
        shares = [f"{each.name} {percent_text(each.share)}" for each in self.impacts if each.share >= 0.001]
        without = f", without {', '.join(self.left_out)}" if self.left_out else ""
        return [f"impact{without}: {', '.join(shares)}; noise {percent_text(self.noise_share)}"]

    def usage(self) -> list[str]:
        """The call and the marker that use the result, to copy. Empty without a best cell."""
        by_mode: dict[str, list[int]] = {}
        for size, each in self.best_of.items():
            if each.cell.graph:
                by_mode.setdefault(each.cell.compile, []).append(size)
        found = []
        for mode, sizes in by_mode.items():
            if mode == "none":
                found.append(f"GraphRunner(model, *inputs, batch_sizes={tuple(sizes)})")
            found.append(f"@pytest.mark.graph_speedup(batch_sizes={sizes}, compile={mode!r})")
        return found

    def document(self) -> dict[str, Any]:
        """The report as plain data. Times in seconds, memory in bytes."""
        return {
            "name": self.name,
            "device": tuned_file.device_key(self.device) if self.device else None,
            "objective": self.objective,
            "tolerance": self.tolerance,
            "best": None if self.best is None else self.best.cell._asdict(),
            "is_best_decided": self.is_best_decided,
            "best_of": {str(size): each.cell._asdict() for size, each in self.best_of.items()},
            "cells": [_cell_document(each) for each in self.cells],
            "impact": {each.name: each.share for each in self.impacts},
            "noise_share": self.noise_share,
            "left_out": list(self.left_out),
        }

    def save(self, path: str | Path) -> None:
        """Write the result into ``tuned.json``, for :meth:`GraphRunner.tuned`. Other entries of the file stay.

        An entry belongs to a name and a device. Raises :class:`~pytest_cudagraph.errors.CudagraphError` if the file
        cannot be read or written, or if nothing was measured.
        """
        tuned_file.save(Path(path), self.document())

    def expect_best(self, path: str | Path, *, within: float = 0.03) -> None:
        """Check that the saved best of each batch size still is the best here, up to a fraction of the cost.

        Raises :class:`~pytest_cudagraph.errors.ExpectationMissed` where another cell is now better than that, or the
        saved one was not measured, and :class:`~pytest_cudagraph.errors.InputError` for a file without such an entry.
        Does nothing where nothing was measured, without ``--cudagraph``.
        """
        __tracebackhide__ = True
        if self.device is None:
            return
        missed = []
        for size, saved in tuned_file.best_of(Path(path), self.name, self.device).items():
            cell = TuningCell(size, saved["compile"], saved["graph"])
            missed += self._worse(cell, within)
        if missed:
            raise ExpectationMissed("\n  ".join([*missed, *self.lines()]))

    def _worse(self, saved: TuningCell, within: float) -> list[str]:
        best = self.best_of.get(saved.batch_size)
        now = next((each for each in self.cells if each.cell == saved), None)
        if best is None or now is None or now.cost is None or best.cost is None:
            why = now.reason if now is not None and now.reason else "it is not part of this grid"
            return [f"the saved best, {saved}, was not measured: {why}"]
        if now.cost <= best.cost * (1.0 + within):
            return []
        behind = factor_text(now.cost / best.cost)
        return [
            f"the saved best, {saved}, costs {behind} as much as {best.cell}; allowed are {factor_text(1.0 + within)}"
        ]


_TITLE = f"batch  compile   graph{'latency':>11}{'per row':>11}{'memory':>12}  place"


def _key(cell: TuningCell) -> str:
    return f"{cell.batch_size:>5}  {cell.compile:<8}  {'yes' if cell.graph else 'no':<5}"


def _cell_document(each: MeasuredCell) -> dict[str, Any]:
    return {
        **each.cell._asdict(),
        "place": each.place,
        "latency_seconds": None if each.latency_ns is None else to_seconds(each.latency_ns),
        "cost": each.cost,
        "samples": each.samples,
        "memory_bytes": each.memory_bytes,
        "reason": each.reason or None,
    }


def left_out_texts(factors: Sequence[str], levels: Sequence[tuple[int, object]]) -> tuple[str, ...]:
    """``compile='aot'`` for each level that an impact leaves out."""
    return tuple(f"{factors[i]}={value!r}" for i, value in levels)


def of_size(cells: Mapping[TuningCell, object], size: int) -> list[TuningCell]:
    """The cells of one batch size."""
    return [cell for cell in cells if cell.batch_size == size]
