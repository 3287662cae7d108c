"""A guided decode step beside a greedy one: samples from one position, and what the masks take of them."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from pytest_cudagraph.decoding.engine import padded
from pytest_cudagraph.decoding.guided import GuidedEngine
from pytest_cudagraph.decoding.guided_results import GuidedTimes
from pytest_cudagraph.decoding.prompts import GenerationSettings
from pytest_cudagraph.decoding.times import STEPS_PER_SAMPLE, per_step
from pytest_cudagraph.measure import Arms
from pytest_cudagraph.pipeline.batch_timing import ArmsBudget, time_arms
from pytest_cudagraph.pipeline.device_context import DeviceContext
from pytest_cudagraph.protocols import Clock
from pytest_cudagraph.stats import summaries
from pytest_cudagraph.values import Interval, Timing


class RepeatedGuidedSteps:
    """Some steps after the prompts, greedy and guided, by the graphs. :meth:`rewind` returns to their start.

    Both wait for each token before the next step, as a server does that looks for stop tokens.
    """

    def __init__(self, guided: GuidedEngine, prompts: torch.Tensor, steps: int, clock: Clock) -> None:
        """Prefill the prompts. ``steps`` is at most the length of a generation. Runs in the backend's mode."""
        self._guided, self._engine, self._now_ns = guided, guided.engine, clock.now_ns
        self._decoder, self._rows = guided.engine.decoder, prompts.shape[0]
        room = self._decoder.length - prompts.shape[1]
        self.steps = max(min(STEPS_PER_SAMPLE, steps - 1, room), 1)
        self.rows_masks_ns: list[float] = []
        """The time of the masks of all rows, of each guided step."""
        size = guided.rows_of_graph(self._rows)
        self._masks = guided.masks(self._rows, size)
        self._masks.fill()
        step = self._engine.prefill(padded(prompts, size))
        self._first = guided.choose(step.logits[:, -1], self._masks).clone()
        self._moved = 0

    def arms(self) -> Arms:
        """The greedy steps are the first arm, the guided ones the second."""
        return Arms(eager=self._greedy, replay=self._steps)

    def rewind(self) -> None:
        """Return the decoder and the grammar to the first token."""
        if self._moved:
            self._decoder.rewind(self._moved)
            self._moved = 0
        self._masks.restart()

    def _greedy(self) -> None:
        tokens = self._first
        for _ in range(self.steps):
            tokens.tolist()
            tokens = self._engine.step(tokens).tokens[:, -1:]
        self._moved = self.steps

    def _steps(self) -> None:
        tokens = self._first
        for _ in range(self.steps):
            chosen = tokens[: self._rows, 0].tolist()
            step = self._engine.step(tokens)
            start_ns = self._now_ns()
            self._masks.accept(chosen)
            self._masks.fill()
            self.rows_masks_ns.append(float(self._now_ns() - start_ns))
            tokens = self._guided.choose(step.logits[:, -1], self._masks)
        self._moved = self.steps


def time_guided(
    guided: GuidedEngine,
    prompts: torch.Tensor,
    steps: int,
    device_context: DeviceContext,
    limit: float | None,
    settings: GenerationSettings,
) -> tuple[Timing, GuidedTimes]:
    """Measure guided against greedy steps. Without a ``limit`` of the overhead for the shortest time only."""
    if limit is None:
        device_context = replace(device_context, why_not_judged="there is no limit")
    with guided.engine.running():
        repeated = RepeatedGuidedSteps(guided, prompts, steps, device_context.clock)
        # At most a share of overhead is at least this speed.
        budget = ArmsBudget(min_speedup=1 / (1 + (limit or 0.0)), budget_ns=settings.budget_ns, seed=settings.seed)
        timing = time_arms(repeated.arms(), budget, repeated.rewind, device_context, lambda line: None)
    timing = per_step(timing, repeated.steps)
    return timing, summary(timing, repeated.rows_masks_ns, prompts.shape[0])


def summary(timing: Timing, rows_masks_ns: list[float], rows: int) -> GuidedTimes:
    """The times of one step. Overhead is ``1 / (greedy / guided) - 1``, so its bounds change places."""
    speedup, masks_ns = timing.speedup, summaries.median(rows_masks_ns)
    return GuidedTimes(
        greedy=timing.eager,
        guided=timing.replay,
        overhead=Interval(
            estimate=_overhead(speedup.estimate), low=_overhead(speedup.high), high=_overhead(speedup.low)
        ),
        mask_ns=masks_ns / rows,
        mask_share=masks_ns / timing.replay.median_ns,
    )


def _overhead(speedup: float) -> float:
    return 1 / speedup - 1 if speedup > 0 else math.inf
