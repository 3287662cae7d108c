"""Noise by formula: what each kind does to the calls of both arms, in factors of an undisturbed call.

Every source is a generator of chunks ``(eager, replay)``, arrays of factors for the next slots. Times are turned into
numbers of slots by the length of an undisturbed call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytest_cudagraph.measure.sampling import block_size

Factors = NDArray[np.float64]
Chunks = Iterator[tuple[Factors, Factors]]
Source = Callable[[np.random.Generator, float], Chunks]
"""From a generator of chance and the ns of a call to endless chunks."""

CHUNK = 1024
_S, _MS = 1e9, 1e6

_SLOT = 1.075
"""A slot's mean length in calls of replay: eager, near the threshold, takes some 1.15 of them."""


def _jitter(rng: np.random.Generator, scale: float = 0.01) -> Factors:
    """What every call has: Student's t with three degrees of freedom on the logarithm, cut at 30 scales."""
    return np.exp(scale * np.clip(rng.standard_t(3, CHUNK), -30, 30))


def _indices() -> Iterator[NDArray[np.int64]]:
    start = 0
    while True:
        yield np.arange(start, start + CHUNK)
        start += CHUNK


def _switching(rng: np.random.Generator, on_slots: float, off_slots: float) -> Iterator[NDArray[np.bool_]]:
    """Chunks of a state that is on and off for exponential times of these means, in balance from the start."""
    on = bool(rng.random() < on_slots / (on_slots + off_slots))
    left = 0
    while True:
        chunk = np.empty(CHUNK, dtype=np.bool_)
        filled = 0
        while filled < CHUNK:
            if left <= 0:
                left = max(1, round(rng.exponential(on_slots if on else off_slots)))
                on = not on
            taken = min(left, CHUNK - filled)
            chunk[filled : filled + taken] = not on
            filled, left = filled + taken, left - taken
        yield chunk


def heavy_tails(rng: np.random.Generator, call_ns: float) -> Chunks:
    """One-sided delays without a mean (Pareto, exponent 0.9) on one call in ten, beside the usual jitter."""
    while True:
        late = rng.random(CHUNK) < 0.1
        factors = _jitter(rng, 0.02) * (1 + late * 0.05 * np.minimum(rng.pareto(0.9, CHUNK), 1e4))
        yield factors, factors


def two_modes(rng: np.random.Generator, call_ns: float) -> Chunks:
    """Three calls of ten take 1.4 times as long, at random."""
    while True:
        factors = _jitter(rng) * np.where(rng.random(CHUNK) < 0.3, 1.4, 1.0)
        yield factors, factors


def slow_drift(rng: np.random.Generator, call_ns: float) -> Chunks:
    """The level swings by 10 % within some seconds."""
    period_ns, phase = rng.uniform(2, 8) * _S, rng.uniform(0, 2 * math.pi)
    for index in _indices():
        factors = _jitter(rng) * (1 + 0.1 * np.sin(2 * math.pi * index * call_ns / period_ns + phase))
        yield factors, factors


def throttling(rng: np.random.Generator, call_ns: float) -> Chunks:
    """The machine runs at two thirds of its speed for a quarter of the time, half a second at once."""
    slot_ns = _SLOT * call_ns
    for slow in _switching(rng, 0.5 * _S / (1.5 * slot_ns), 1.5 * _S / slot_ns):
        factors = _jitter(rng) * np.where(slow, 1.5, 1.0)
        yield factors, factors


def plain(rng: np.random.Generator, call_ns: float) -> Chunks:
    """The usual jitter alone."""
    while True:
        factors = _jitter(rng)
        yield factors, factors


def bursts(rng: np.random.Generator, call_ns: float) -> Chunks:
    """Neighbours cost both arms 40 % for 60 ms at a time, 30 % of the time."""
    slot_ns = _SLOT * call_ns
    for busy in _switching(rng, 60 * _MS / (1.4 * slot_ns), 140 * _MS / slot_ns):
        factors = _jitter(rng) * np.where(busy, 1.4, 1.0)
        yield factors, factors


def eager_bursts(rng: np.random.Generator, call_ns: float) -> Chunks:
    """The same bursts, felt by eager alone: a busy host under a device of its own."""
    slot_ns = _SLOT * call_ns
    for busy in _switching(rng, 60 * _MS / (1.2 * slot_ns), 140 * _MS / slot_ns):
        jitter = _jitter(rng)
        yield jitter * np.where(busy, 1.4, 1.0), jitter


def replay_bursts(rng: np.random.Generator, call_ns: float) -> Chunks:
    """The same bursts, felt by replay alone: a neighbour on the device."""
    for slowed, plain in eager_bursts(rng, call_ns):
        yield plain, slowed


def saturated(rng: np.random.Generator, call_ns: float) -> Chunks:
    """Both cores taken: after 8 ms of work, at random, whoever runs waits some 8 ms (4 to 16) for its turn."""
    work_ns = _SLOT * call_ns
    while True:
        waits = rng.poisson(work_ns / (8 * _MS), CHUNK)
        longest = max(1, int(waits.max()))
        each_ns = 8 * _MS * np.exp2(rng.uniform(-1, 1, (CHUNK, longest)))
        waiting_ns = (each_ns * (np.arange(longest) < waits[:, None])).sum(axis=1)
        factors = _jitter(rng) + waiting_ns / work_ns
        yield factors, factors


def starved(rng: np.random.Generator, call_ns: float) -> Chunks:
    """A core shared with ten others, in turn: 3 ms of work (10 % more or less), then a wait of 15 to 60 ms.

    Of calls of 2 ms seven in ten wait: in most blocks one arm did and the other did not.
    """
    work_ns, left_ns = _SLOT * call_ns, rng.uniform(0, 3 * _MS)
    while True:
        factors = _jitter(rng)
        ends_ns = np.cumsum(factors * work_ns)
        run_order = math.ceil(ends_ns[-1] / (2.7 * _MS)) + 1
        stops_ns = left_ns + np.cumsum(np.concatenate([[0.0], 3 * _MS * rng.uniform(0.9, 1.1, run_order)]))
        waited_ns = np.concatenate([[0.0], np.cumsum(30 * _MS * np.exp2(rng.uniform(-1, 1, run_order)))])
        stopped = np.searchsorted(stops_ns, ends_ns)
        left_ns = stops_ns[stopped[-1]] - ends_ns[-1]
        slowed = factors + np.diff(waited_ns[stopped], prepend=0.0) / work_ns
        yield slowed, slowed


def stalls(rng: np.random.Generator, call_ns: float) -> Chunks:
    """Every call waits 10 to 25 ms for a CPU, whichever arm it is of."""
    while True:
        factors = _jitter(rng) + rng.uniform(10, 25, CHUNK) * _MS / call_ns
        yield factors, factors


def stalls_half(rng: np.random.Generator, call_ns: float) -> Chunks:
    """The same stalls in half of the blocks: for some 32 calls, then for as many not."""
    stalled = stalls(rng, call_ns)
    for waits in _switching(rng, 32, 32):
        factors = np.where(waits, next(stalled)[0], _jitter(rng))
        yield factors, factors


def every_fourth(rng: np.random.Generator, call_ns: float) -> Chunks:
    """Every fourth call, whoever makes it, costs 30 % more."""
    phase = rng.integers(4)
    for index in _indices():
        factors = _jitter(rng) * np.where((index + phase) % 4 == 0, 1.3, 1.0)
        yield factors, factors


def cold_start(rng: np.random.Generator, call_ns: float) -> Chunks:
    """An arm's first call takes sixty times as long (at most 50 ms more); eager settles from 1.5 within forty."""
    extra = min(59.0, 50 * _MS / call_ns)
    for index in _indices():
        jitter = _jitter(rng)
        first = np.where(index == 0, 1 + extra, 1.0)
        yield jitter * first * (1 + 0.5 * np.exp(-index / 10)), jitter * first


def correlated(rng: np.random.Generator, call_ns: float) -> Chunks:
    """The log-ratio itself wanders: AR(1) with 0.5 from block to block, standard deviation 2 %."""
    slots = 2 * block_size(2 * call_ns)
    state, left = rng.normal(), 0
    while True:
        levels = np.empty(CHUNK)
        filled = 0
        while filled < CHUNK:
            if left == 0:
                state, left = 0.5 * state + math.sqrt(0.75) * rng.normal(), slots
            taken = min(left, CHUNK - filled)
            levels[filled : filled + taken] = state
            filled, left = filled + taken, left - taken
        jitter = _jitter(rng, 0.005)
        yield jitter * np.exp(0.02 * levels), jitter


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of noise, and how the machine shows it."""

    source: Source
    own_tapes: bool = False
    """Whether each arm has its own course, counted in its own calls."""
    clock_step_ns: int = 1
    starves: bool = False
    """Whether next to no time is left for work: a verdict must not be wrong, but need not come."""
    longest_work: float = math.inf
    """In calls: what a call takes beyond that is a wait, which takes no CPU time."""
    one_sided: bool = False
    """Whether it falls on eager alone, so that no order of calls can cancel it."""


KINDS = {
    "heavy-tails": Kind(source=heavy_tails),
    "two-modes": Kind(source=two_modes),
    "slow-drift": Kind(source=slow_drift),
    "throttling": Kind(source=throttling),
    "coarse-clock": Kind(source=plain, clock_step_ns=500),
    "bursts": Kind(source=bursts),
    "eager-bursts": Kind(source=eager_bursts, one_sided=True),
    "replay-bursts": Kind(source=replay_bursts, one_sided=True),
    "saturated": Kind(source=saturated),
    "starved": Kind(source=starved, starves=True),
    "stalls": Kind(source=stalls, starves=True, longest_work=2.0),
    "stalls-half": Kind(source=stalls_half, starves=True, longest_work=2.0),
    "every-fourth": Kind(source=every_fourth),
    "cold-start": Kind(source=cold_start, own_tapes=True),
    "ar1": Kind(source=correlated),
}
