"""What the tuner found: each combination with its place or its reason, and the best."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_cudagraph.errors import ExpectationMissed, InconclusiveWarning
from pytest_cudagraph.foreign import printable
from pytest_cudagraph.serving import tuned_file
from pytest_cudagraph.serving.tuning.grid import Combination
from pytest_cudagraph.serving.tuning.race import Place, is_above
from pytest_cudagraph.units import bytes_text, factor_text, latency_text, percent_text, plural, seconds_text, to_seconds
from pytest_cudagraph.values import DeviceInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCombination:
    """One combination. Without a place it was not measured, and ``reason`` says why."""

    combination: Combination
    place: Place | None = None
    """Among the combinations of its batch size."""
    latency_ns: float | None = None
    """Median, per call."""
    cost: float | None = None
    """By the objective; lower is better. Relative to the best, by the rounds in which both were timed."""
    behind_logs: tuple[float, ...] = ()
    """The log-ratio of its cost to the best's of its batch size, one for each round that both ran."""
    samples: int = 0
    memory_bytes: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningReport:
    """The result of one :func:`tune`. Without any measured combination ``best`` is None."""

    name: str
    device: DeviceInfo | None
    """None where nothing was measured, without ``--cudagraph``."""
    model: str = ""
    """Tells this model from others of its class: see :func:`tuned_file.fingerprint`."""
    objective: str
    tolerance: float
    combinations: tuple[MeasuredCombination, ...]
    best: MeasuredCombination | None
    is_best_decided: bool
    """Whether the best of all is, with confidence, not worse than any other by more than the tolerance."""
    measure_ns: float = 0.0
    notes: tuple[str, ...] = field(default=())

    @property
    def best_of(self) -> dict[int, MeasuredCombination]:
        """The best combination of each batch size that has one."""
        return {each.combination.batch_size: each for each in self.combinations if each.place == "best"}

    def lines(self) -> list[str]:
        """The report as text, at most 100 columns where the reasons are short."""
        measured = [each for each in self.combinations if each.place]
        samples = sum(each.samples for each in measured)
        measured_text = f"{len(measured)} measured in {seconds_text(self.measure_ns)}, {plural(samples, 'sample')}"
        count = plural(len(self.combinations), "combination")
        lines = [f"{self.name}: {count}, {measured_text}, objective: {self.objective}", _TITLE]
        for each in self.combinations:
            lines.append(self._row(each) if each.place else f"{_key(each.combination)}  not measured: {each.reason}")
        if self.best is not None:
            certain = "" if self.is_best_decided else f" (not proven within {percent_text(self.tolerance)})"
            lines.append(f"best: {self.best.combination}{certain}")
        return [printable(line) for line in [*lines, *self.notes, *(f"to use: {text}" for text in self.usage())]]

    def _row(self, each: MeasuredCombination) -> str:
        best = self.best_of[each.combination.batch_size]
        latency_ns, size = each.latency_ns or 0.0, each.combination.batch_size
        memory = "" if each.memory_bytes is None else bytes_text(each.memory_bytes)
        behind = factor_text((each.cost or 0.0) / (best.cost or 1.0))
        place = "best" if each.place == "best" else f"{each.place}, {behind} the best"
        times = f"{latency_text(latency_ns):>11}{latency_text(latency_ns / size):>11}"
        return f"{_key(each.combination)}{times}{memory:>12}  {place}"

    def usage(self) -> list[str]:
        """The call and the marker that use the result, to copy. Empty without a best combination."""
        by_mode: dict[str, list[int]] = {}
        for size, each in self.best_of.items():
            if each.combination.graph:
                by_mode.setdefault(each.combination.compile, []).append(size)
        texts = []
        for mode, sizes in by_mode.items():
            if mode == "none":
                texts.append(f"GraphRunner(model, *inputs, batch_sizes={tuple(sizes)})")
            texts.append(f"@pytest.mark.graph_speedup(batch_sizes={sizes}, compile={mode!r})")
        return texts

    def document(self) -> dict[str, Any]:
        """The report as plain data. Times in seconds, memory in bytes."""
        return {
            "name": self.name,
            "device": tuned_file.device_key(self.device) if self.device else None,
            "model": self.model,
            "software": self.device.software if self.device else None,
            "objective": self.objective,
            "tolerance": self.tolerance,
            "best": None if self.best is None else self.best.combination._asdict(),
            "is_best_decided": self.is_best_decided,
            "best_of": {str(size): each.combination._asdict() for size, each in self.best_of.items()},
            "combinations": [_document_of(each) for each in self.combinations],
        }

    def save(self, path: str | Path) -> None:
        """Write the result into ``tuned.json``, for :meth:`GraphRunner.tuned`. Other entries of the file stay.

        An entry belongs to a name, a device and a model. Raises :class:`~pytest_cudagraph.errors.CudagraphError` if the
        file cannot be read or written, or if nothing was measured.
        """
        tuned_file.save(Path(path), self.document())

    def expect_best(self, path: str | Path, *, within: float = 0.03) -> None:
        """Check that the saved best of each batch size still is the best here, up to a fraction of the cost.

        It fails on evidence only, at 5 % for all batch sizes together: the bets of the race on the rounds that both
        combinations ran. What seems worse without that evidence is an
        :class:`~pytest_cudagraph.errors.InconclusiveWarning`. Raises
        :class:`~pytest_cudagraph.errors.ExpectationMissed` where another combination is now better than that, or
        the saved one was not measured, and :class:`~pytest_cudagraph.errors.InputError` for a file without such an
        entry. Does nothing where nothing was measured, without ``--cudagraph``.
        """
        __tracebackhide__ = True
        if self.device is None:
            return
        saved = tuned_file.best_of(Path(path), self.name, self.device, self.model)
        missed: list[str] = []
        for size, best in saved.items():
            others = len(of_size([each.combination for each in self.combinations], size)) - 1
            alpha = _ALPHA / len(saved) / max(others, 1)
            missed += self._worse(Combination(size, best["compile"], best["graph"]), within, alpha)
        if missed:
            raise ExpectationMissed("\n  ".join([*missed, *self.lines()]))

    def _worse(self, saved: Combination, within: float, alpha: float) -> list[str]:
        best = self.best_of.get(saved.batch_size)
        now = next((each for each in self.combinations if each.combination == saved), None)
        if best is None or now is None or now.cost is None or best.cost is None:
            why = now.reason if now is not None and now.reason else "it is not part of this grid"
            return [f"the saved best, {saved}, was not measured: {why}"]
        if now.cost <= best.cost * (1.0 + within):
            return []
        behind, allowed = factor_text(now.cost / best.cost), factor_text(1.0 + within)
        worse = f"the saved best, {saved}, costs {behind} as much as {best.combination}; allowed are {allowed}"
        if is_above(now.behind_logs, math.log1p(within), alpha=alpha):
            return [worse]
        rounds = plural(len(now.behind_logs), "round")
        warnings.warn(
            f"{worse}; {rounds} do not prove it: give a larger time budget", InconclusiveWarning, stacklevel=3
        )
        return []


_ALPHA = 0.05
_TITLE = f"batch  compile   graph{'latency':>11}{'per row':>11}{'memory':>12}  place"


def _key(combination: Combination) -> str:
    return f"{combination.batch_size:>5}  {combination.compile:<8}  {'yes' if combination.graph else 'no':<5}"


def _document_of(each: MeasuredCombination) -> dict[str, Any]:
    return {
        **each.combination._asdict(),
        "place": each.place,
        "latency_seconds": None if each.latency_ns is None else to_seconds(each.latency_ns),
        "cost": each.cost,
        "samples": each.samples,
        "memory_bytes": each.memory_bytes,
        "reason": each.reason or None,
    }


def of_size(combinations: Iterable[Combination], size: int) -> list[Combination]:
    """The combinations of one batch size."""
    return [combination for combination in combinations if combination.batch_size == size]
