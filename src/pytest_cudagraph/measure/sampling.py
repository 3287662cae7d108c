"""Randomised blocks of eager and replay, until the rule has finished or the bound is near."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pytest_cudagraph.measure.timer import WINDOW, ArmName, ClockTooCoarse, Timer, calibrate_inner_calls
from pytest_cudagraph.protocols import StoppingRule
from pytest_cudagraph.stats import FixedTimeRule, summaries
from pytest_cudagraph.values import Block

Vet = Callable[[], str]
"""Says what has disturbed the device since it was last asked, empty if nothing did; never asked in a timed interval."""

_PERIOD_NS = 50_000_000
"""Asking takes about a millisecond per GPU: a fiftieth of the time."""


@dataclass(slots=True, kw_only=True)
class HealthFilter:
    """Asks now and then, and tells how many of the blocks taken since the last time to throw away."""

    vet: Vet | None = None
    discarded: int = 0
    reasons: dict[str, None] = field(default_factory=dict)  # a set that keeps its order
    _asked_ns: float = 0.0

    def is_due(self, elapsed_ns: float) -> bool:
        """Whether the blocks that wait can be decided on: at once where nobody vets them."""
        return self.vet is None or elapsed_ns - self._asked_ns >= _PERIOD_NS

    def passes(self, waiting: int, elapsed_ns: float) -> bool:
        """Whether the blocks that wait count; those that do not are counted here, with the reason."""
        self._asked_ns = elapsed_ns
        found = self.vet() if self.vet is not None else ""
        if found:
            self.discarded += waiting
            self.reasons[found] = None
        return not found


Progress = Callable[[float, float], None]
"""Told after each block: the time spent so far and the hard bound, in ns. Never called inside a timed interval."""

_BLOCK_NS = 1_000_000
"""A block spreads over about a millisecond of pairs: shorter than drift, long enough for an order statistic."""

_LONG_PAIR_NS = 2_000_000
"""From here on a block is one quad: more blocks decide sooner than calmer ones, also beside noisy neighbours."""

_COMPILED_PER_BLOCK = 2

_EAGER_FIRST: tuple[ArmName, ...] = ("eager", "replay", "replay", "eager")
_REPLAY_FIRST: tuple[ArmName, ...] = ("replay", "eager", "eager", "replay")


def block_size(pair_ns: float) -> int:
    """Samples per arm and block: even, 4 to 32; 2 for long calls."""
    if pair_ns > _LONG_PAIR_NS:
        return 2
    return min(max(2 * round(_BLOCK_NS / pair_ns / 2), 4), 32)


class _Taken(NamedTuple):
    """One block and its samples by arm; None for a block that was cut short."""

    block: Block | None
    samples_ns: dict[ArmName, list[float]]


@dataclass(slots=True, kw_only=True)
class Sampling:
    """The interleaved blocks of one measurement."""

    timer: Timer
    rule: StoppingRule
    """Replaced by one that decides nothing where the clock is too coarse for a verdict."""
    rng: random.Random
    warm_ns: Mapping[ArmName, Sequence[float]]
    vetting: HealthFilter = field(default_factory=HealthFilter)
    waiting: list[_Taken] = field(default_factory=list)
    """Taken since the device was last asked after; they count once it is known to have been well."""
    blocks: list[Block] = field(default_factory=list)
    samples_ns: dict[ArmName, list[float]] = field(init=False)
    too_coarse: ClockTooCoarse | None = field(init=False)
    quads: int = field(init=False)
    expected_ns: dict[bool, float] = field(init=False)
    """How long a quad (True) and a lone sample (False) took last."""

    def __post_init__(self) -> None:
        self.samples_ns = {name: [] for name in self.warm_ns}
        level_ns = {name: min(samples[-WINDOW:]) for name, samples in self.warm_ns.items()}
        self.too_coarse = calibrate_inner_calls(self.timer, level_ns)
        if self.too_coarse and self.rule.target_ratio is not None:
            self.rule = FixedTimeRule()
        repeats, prepare_ns = self.timer.inner_calls, self.timer.prepare_ns
        pair_ns = repeats * (level_ns["eager"] + level_ns["replay"])
        self.quads = block_size(pair_ns) // 2
        lone_ns = repeats * level_ns.get("compiled", 0.0)
        self.expected_ns = {True: 2 * pair_ns + 4 * prepare_ns, False: lone_ns + prepare_ns}

    def run(self, progress: Progress | None) -> None:
        """Sample block after block until the rule has finished or nothing more fits into the bound."""
        timer = self.timer
        begin_ns = timer.elapsed_ns
        while self._block() and not self._is_finished(begin_ns):
            if progress is not None:
                progress(timer.elapsed_ns, timer.bounds.extended_ns)
        # What waits when the time is out counts too, if the device was well, and may decide.
        if self.waiting:
            self._decide_on_waiting()
            self.rule.is_finished(timer.elapsed_ns - begin_ns)

    def _is_finished(self, begin_ns: float) -> bool:
        if not self.vetting.is_due(self.timer.elapsed_ns):
            return False
        self._decide_on_waiting()
        return self.rule.is_finished(self.timer.elapsed_ns - begin_ns)

    def _decide_on_waiting(self) -> None:
        """Count what was taken since the last time, or throw it away where the device was disturbed."""
        waiting, self.waiting = self.waiting, []
        count = sum(taken.block is not None for taken in waiting)
        if not waiting or not self.vetting.passes(count, self.timer.elapsed_ns):
            return
        for block, samples_ns in waiting:
            for name, of_arm_ns in samples_ns.items():
                self.samples_ns[name] += of_arm_ns
            if block is not None:
                self.blocks.append(block)
                self.rule.add(block)

    def _block(self) -> bool:
        """Sample one block; False when the bound cut it short.

        What is left of a cut block counts only when there is no other: a result must always come.
        """
        block_ns: dict[ArmName, list[float]] = {name: [] for name in self.samples_ns}
        whole = all(self._step(names, block_ns) for names in self._plan())
        block = None
        if block_ns["eager"] and (whole or not (self.blocks or self.waiting)):
            block = Block(
                eager_ns=summaries.quantile(block_ns["eager"], 0.25),
                replay_ns=summaries.quantile(block_ns["replay"], 0.25),
            )
        self.waiting.append(_Taken(block, block_ns))
        return whole

    def _plan(self) -> list[tuple[ArmName, ...]]:
        """The block's order: each quad by a fresh coin, so that no periodic cost can stay in step with one arm."""
        plan = [_EAGER_FIRST if self.rng.random() < 0.5 else _REPLAY_FIRST for _ in range(self.quads)]
        for _ in range(_COMPILED_PER_BLOCK if "compiled" in self.samples_ns else 0):
            plan.insert(self.rng.randrange(len(plan) + 1), ("compiled",))
        return plan

    def _step(self, names: tuple[ArmName, ...], block_ns: dict[ArmName, list[float]]) -> bool:
        """Sample the arms in this order, if that still fits; judged by how long the same step took last."""
        timer, is_quad = self.timer, len(names) > 1
        if not timer.fits(self.expected_ns[is_quad]):
            # A slow diagnostic arm is left out; it must not end the measurement of the others.
            return not is_quad
        begin_ns = timer.elapsed_ns
        for name in names:
            block_ns[name].append(timer.sample_ns(name))
        self.expected_ns[is_quad] = timer.elapsed_ns - begin_ns
        return True
