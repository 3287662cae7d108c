"""The scenarios: traces of real machines and noise by formula, each able to be any speedup."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.error_rates.machine import Machine, SimulatedClock, Tape
from benchmarks.error_rates.noise import CHUNK, KINDS, Chunks, Kind
from numpy.typing import NDArray

TRACES = Path(__file__).resolve().parents[1] / "data" / "timing_traces.npz"

CALL_NS = {"20us": 20e3, "200us": 200e3, "2ms": 2e6, "50ms": 50e6}
"""The lengths of a call; a trace has its own."""

_ALSO_AT = {
    "20us": ("coarse-clock", "heavy-tails", "every-fourth", "eager-bursts", "replay-bursts", "saturated"),
    "50ms": ("throttling", "bursts", "eager-bursts", "saturated", "cold-start", "ar1"),
}
"""The noise that is tried beyond 200 µs and 2 ms: what these lengths could make worse."""

_ON_THEIR_OWN = ("eager-bursts", "replay-bursts", "ar1", "saturated", "starved", "stalls", "stalls-half")

_RESOLUTION_NS = 50.0
"""What Python's counter costs and resolves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A source of noise at one length of a call."""

    name: str
    length: str
    group: str
    kind: Kind | None = None
    """The formula; None for a trace."""

    @property
    def truth_margin_ratio(self) -> float:
        """How well the true speedup is known; nearer to the threshold nothing can be called wrong.

        The speed of a CPU under another device wanders by 1-2 % within seconds, and the true ratio with it.
        """
        return 0.02 if self.name.startswith("asym") else 0.0

    @property
    def trials_share(self) -> float:
        """Of the trials asked for: a trial of 20 µs calls takes ten times as long to simulate as one of 2 ms."""
        return 0.2 if self.length == "20us" else 1.0

    @property
    def one_sided(self) -> bool:
        return self.kind is not None and self.kind.one_sided

    def machine(self, true_ratio: float, rng: np.random.Generator) -> Machine:
        """A fresh machine on which eager takes ``true_ratio`` times as long as replay."""
        step_ns = 1 if self.kind is None else self.kind.clock_step_ns
        clock = SimulatedClock(max(_RESOLUTION_NS, step_ns), step_ns)
        tape = self._tape(true_ratio, rng)
        own = self.kind is not None and self.kind.own_tapes
        longest_work_ns = math.inf if self.kind is None else self.kind.longest_work * CALL_NS[self.length]
        replay = self._tape(true_ratio, rng) if own else tape
        return Machine(clock=clock, eager=tape, replay=replay, longest_work_ns=longest_work_ns)

    def _tape(self, true_ratio: float, rng: np.random.Generator) -> Tape:
        if self.kind is None:
            return _slots(_trace_chunks(self.name, rng), true_ratio)
        call_ns = CALL_NS[self.length]
        return _slots(self.kind.source(rng, call_ns), true_ratio * call_ns, call_ns)


def _slots(chunks: Chunks, eager_scale: float, replay_scale: float = 1.0) -> Tape:
    for eager, replay in chunks:
        yield from zip((eager * eager_scale).tolist(), (replay * replay_scale).tolist(), strict=True)


def _trace_chunks(name: str, rng: np.random.Generator) -> Chunks:
    """The trace from a random moment on, round and round; ns per slot at equal work of both arms."""
    slots = load_trace(name)
    start = int(rng.integers(len(slots)))
    while True:
        rows = slots.take(range(start, start + CHUNK), axis=0, mode="wrap")
        yield rows[:, 0], rows[:, 1]
        start = (start + CHUNK) % len(slots)


@lru_cache(maxsize=2)
def load_trace(name: str) -> NDArray[np.float64]:
    """Slots of one trace, in ns, both columns at equal work: shape ``(slots, 2)``.

    Where both arms did the same work, a slot serves either. Where they did not, a pair becomes two slots with the
    readings of both arms, so that each arm keeps its own noise and each slot takes about its real time.
    """
    with np.load(TRACES) as file:
        readings: NDArray[Any] = file[name].astype(np.float64)
    if readings.ndim == 1:
        return np.stack([readings, readings], axis=1)
    if name.startswith("asym"):  # a wait against work: only what was measured tells the ratio
        readings[:, 0] /= np.median(readings[:, 0]) / np.median(readings[:, 1])
    else:
        readings[:, 0] /= 23 / 20
    return np.repeat(readings, 2, axis=0)


def _trace_scenarios() -> Iterator[Scenario]:
    with np.load(TRACES) as file:
        names = sorted(file)
    for name in names:
        length = {"20": "20us", "200": "200us", "2000": "2ms"}.get(name.split("_")[1], "200us")
        if name.startswith("asym"):
            group = "trace 200us, device against CPU"
        elif length == "2ms":
            noise = {"quiet": "quiet", "oversub": "oversubscribed"}.get(name.rsplit("_", 1)[1], "neighbours")
            group = f"trace 2ms {noise}"
        else:
            group = f"trace {length}"
        yield Scenario(name=name, length=length, group=group)


def _formula_scenarios() -> Iterator[Scenario]:
    for name, kind in KINDS.items():
        for length in CALL_NS:
            if length in ("20us", "50ms") and name not in _ALSO_AT[length]:
                continue
            group = f"{name} {length}" if name in _ON_THEIR_OWN else f"formula {length}"
            yield Scenario(name=f"{name}_{length}", length=length, group=group, kind=kind)


def all_scenarios() -> list[Scenario]:
    """Traces first, then formulas, the shortest calls first."""
    order = list(CALL_NS)
    return sorted(
        [*_trace_scenarios(), *_formula_scenarios()], key=lambda s: (s.kind is not None, order.index(s.length))
    )
