"""Samples eager and replay in random blocks, until the stopping rule has finished or the bound is near."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pytest_cudagraph.measure.timer import WINDOW, ArmName, ClockTooCoarse, Timer, calibrate_inner_calls
from pytest_cudagraph.protocols import StoppingRule
from pytest_cudagraph.stats import FixedTimeRule, summaries
from pytest_cudagraph.values import Block

Disturbance = Callable[[], str]
"""Names what disturbed the device since the last call, empty if nothing did; never called in a timed interval."""

_PERIOD_NS = 50_000_000
"""A call takes about a millisecond per GPU: a fiftieth of the period."""


@dataclass(slots=True, kw_only=True)
class HealthFilter:
    """Asks periodically for disturbances, and discards the blocks since the last time if there were any."""

    disturbance: Disturbance | None = None
    discarded: int = 0
    reasons: dict[str, None] = field(default_factory=dict)  # an ordered set
    _last_ns: float = 0.0

    def discard(self, reason: str) -> None:
        """Count one block that is left out, with the reason."""
        self.discarded += 1
        self.reasons[reason] = None

    def is_due(self, elapsed_ns: float) -> bool:
        """Whether it is time to ask; always, without a source of disturbances."""
        return self.disturbance is None or elapsed_ns - self._last_ns >= _PERIOD_NS

    def accepts(self, pending: int, elapsed_ns: float) -> bool:
        """Whether the pending blocks count; if not, they are added to ``discarded``, with the reason."""
        self._last_ns = elapsed_ns
        found = self.disturbance() if self.disturbance is not None else ""
        if found:
            self.discarded += pending
            self.reasons[found] = None
        return not found


LEAST_CPU_SHARE = 0.25
"""Of a block's time. With less, what was timed is the wait for a CPU and not the calls."""

WAITED = "the calls waited for a CPU most of the time"

Progress = Callable[[float, float], None]
"""Called after each block with the elapsed time and the hard bound, in ns; never within a timed interval."""

_BLOCK_NS = 1_000_000
"""A block is about a millisecond of pairs: shorter than drift, long enough for an order statistic."""

_LONG_PAIR_NS = 2_000_000
"""From here on a block is one quad: many noisy blocks decide sooner than few quiet ones, even on a busy machine."""

_COMPILED_PER_BLOCK = 2

_EAGER_FIRST: tuple[ArmName, ...] = ("eager", "replay", "replay", "eager")
_REPLAY_FIRST: tuple[ArmName, ...] = ("replay", "eager", "eager", "replay")


def block_size(pair_ns: float) -> int:
    """Samples per arm and block: even, 4 to 32; 2 for long calls."""
    if pair_ns > _LONG_PAIR_NS:
        return 2
    return min(max(2 * round(_BLOCK_NS / pair_ns / 2), 4), 32)


class _Taken(NamedTuple):
    """One block and its samples by arm; the block is None if it was cut short."""

    block: Block | None
    samples_ns: dict[ArmName, list[float]]


@dataclass(slots=True, kw_only=True)
class Sampling:
    """The interleaved blocks of one measurement."""

    timer: Timer
    rule: StoppingRule
    """Replaced by a rule without a verdict if the clock is too coarse."""
    rng: random.Random
    warm_ns: Mapping[ArmName, Sequence[float]]
    health: HealthFilter = field(default_factory=HealthFilter)
    cpu_time_ns: Callable[[], int] | None = None
    """The CPU time of this thread; None where calls wait for a device."""
    pending: list[_Taken] = field(default_factory=list)
    """Blocks since the last health check; they count after a check without a disturbance."""
    blocks: list[Block] = field(default_factory=list)
    block_samples_ns: list[dict[ArmName, list[float]]] = field(default_factory=list)
    """The samples of each of ``blocks``."""
    samples_ns: dict[ArmName, list[float]] = field(init=False)
    too_coarse: ClockTooCoarse | None = field(init=False)
    quads: int = field(init=False)
    expected_ns: dict[bool, float] = field(init=False)
    """The last duration of a quad (True) and of a single sample (False)."""

    def __post_init__(self) -> None:
        self.samples_ns = {name: [] for name in self.warm_ns}
        level_ns = {name: min(samples[-WINDOW:]) for name, samples in self.warm_ns.items()}
        self.too_coarse = calibrate_inner_calls(self.timer, level_ns)
        if self.too_coarse and self.rule.target_ratio is not None:
            self.rule = FixedTimeRule()
        repeats, prepare_ns = self.timer.inner_calls, self.timer.prepare_ns
        pair_ns = repeats * (level_ns["eager"] + level_ns["replay"])
        self.quads = block_size(pair_ns) // 2
        single_ns = repeats * level_ns.get("compiled", 0.0)
        self.expected_ns = {True: 2 * pair_ns + 4 * prepare_ns, False: single_ns + prepare_ns}

    def run(self, progress: Progress | None) -> None:
        """Sample blocks until the rule has finished or no more fit into the bound."""
        timer = self.timer
        begin_ns = timer.elapsed_ns
        while self._block() and not self._is_finished(begin_ns):
            if progress is not None:
                progress(timer.elapsed_ns, timer.bounds.extended_ns)
        # Blocks that are pending at the end count too, if the device was undisturbed, and may decide.
        if self.pending:
            self._settle_pending()
            self.rule.is_finished(timer.elapsed_ns - begin_ns)

    def _is_finished(self, begin_ns: float) -> bool:
        if not self.health.is_due(self.timer.elapsed_ns):
            return False
        self._settle_pending()
        return self.rule.is_finished(self.timer.elapsed_ns - begin_ns)

    def _settle_pending(self) -> None:
        """Count the pending blocks, or discard them if the device was disturbed."""
        pending, self.pending = self.pending, []
        count = sum(taken.block is not None for taken in pending)
        if not pending or not self.health.accepts(count, self.timer.elapsed_ns):
            return
        for block, samples_ns in pending:
            for name, of_arm_ns in samples_ns.items():
                self.samples_ns[name] += of_arm_ns
            if block is not None:
                self.blocks.append(block)
                self.block_samples_ns.append(samples_ns)
                self.rule.add(block)

    def _block(self) -> bool:
        """Sample one block; False if the bound cut it short.

        The rest of such a block counts only if there is no other, because there must be a result.
        """
        block_ns: dict[ArmName, list[float]] = {name: [] for name in self.samples_ns}
        begin_ns, begin_cpu_ns = self.timer.elapsed_ns, self.cpu_time_ns() if self.cpu_time_ns else 0
        whole = all(self._step(names, block_ns) for names in self._plan())
        if self.cpu_time_ns and block_ns["eager"]:
            cpu_ns = self.cpu_time_ns() - begin_cpu_ns
            if cpu_ns < LEAST_CPU_SHARE * (self.timer.elapsed_ns - begin_ns):
                self.health.discard(WAITED)
                return whole
        block = None
        if block_ns["eager"] and (whole or not (self.blocks or self.pending)):
            block = Block(
                eager_ns=summaries.quantile(block_ns["eager"], 0.25),
                replay_ns=summaries.quantile(block_ns["replay"], 0.25),
            )
        self.pending.append(_Taken(block, block_ns))
        return whole

    def _plan(self) -> list[tuple[ArmName, ...]]:
        """The order of a block. Each quad is drawn at random, so that no periodic cost always hits the same arm."""
        plan = [_EAGER_FIRST if self.rng.random() < 0.5 else _REPLAY_FIRST for _ in range(self.quads)]
        for _ in range(_COMPILED_PER_BLOCK if "compiled" in self.samples_ns else 0):
            plan.insert(self.rng.randrange(len(plan) + 1), ("compiled",))
        return plan

    def _step(self, names: tuple[ArmName, ...], block_ns: dict[ArmName, list[float]]) -> bool:
        """Sample the arms in this order, if the last duration of such a step fits; False if a quad does not."""
        timer, is_quad = self.timer, len(names) > 1
        if not timer.fits(self.expected_ns[is_quad]):
            # A slow compiled arm is left out; it must not end the measurement of the others.
            return not is_quad
        begin_ns = timer.elapsed_ns
        for name in names:
            block_ns[name].append(timer.sample_ns(name))
        self.expected_ns[is_quad] = timer.elapsed_ns - begin_ns
        return True
