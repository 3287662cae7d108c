"""Guided generation: a decode step, then the choice of a token that the grammar allows, and the time of both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from pytest_cudagraph.backends.buffers import describe
from pytest_cudagraph.decoding.engine import DecodeEngine, Generated, Step, call_decoder
from pytest_cudagraph.decoding.guided_results import GuidedOutput, GuidedTimes
from pytest_cudagraph.decoding.prompts import GenerationSettings
from pytest_cudagraph.decoding.results import GenerationReceipt
from pytest_cudagraph.decoding.times import STEPS_PER_SAMPLE, per_step
from pytest_cudagraph.decoding.token_masks import RowMasks, TokenGrammar, choose_allowed, packed_width, text_of
from pytest_cudagraph.errors import InputError
from pytest_cudagraph.measure import Arms
from pytest_cudagraph.pipeline.batch_timing import ArmsBudget, time_arms
from pytest_cudagraph.pipeline.device_context import DeviceContext
from pytest_cudagraph.protocols import CapturedGraph, Clock
from pytest_cudagraph.stats import summaries
from pytest_cudagraph.values import Interval, Timing

Choose = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From logits (rows, vocabulary) and packed masks (rows, vocabulary / 32), int32, to tokens (rows, 1), int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedTokens(Generated):
    """The tokens of one guided generation, (rows, count). After a row's stop token there are stop tokens."""

    choices: GenerationReceipt
    steps: int
    """How many tokens were generated before every row had ended."""


class GuidedEngine:
    """Guided generation over the decode steps of an engine. Leaving this context manager changes nothing in it.

    Each token takes two replays: the decode step, whose own greedy choice is not used, and the choice under the mask.
    In between the host fills the mask. So on a GPU it does this while the decode step runs.
    """

    def __init__(self, engine: DecodeEngine, grammar: TokenGrammar, rows: int, choose: Choose | None = None) -> None:
        self.engine, self.grammar = engine, grammar
        self._choose: Choose = choose or choose_allowed
        self._rows = engine.rows_of_graph(rows)
        self._graph = self._captured() if engine.has_graph(self._rows, 1) else None

    def _captured(self) -> CapturedGraph:
        device, vocabulary = self.engine.device, self.engine.vocabulary
        logits = torch.zeros(self._rows, vocabulary, dtype=self.engine.dtype, device=device)
        mask = torch.full((self._rows, packed_width(vocabulary)), -1, dtype=torch.int32, device=device)
        return self.engine.capture_beside(self._checked_choose, (logits, mask), self._rows)

    def _checked_choose(self, logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        tokens = self._choose(logits, mask)
        expected = (logits.shape[0], 1)
        if not isinstance(tokens, torch.Tensor) or tokens.shape != expected or tokens.dtype != torch.int64:
            raise InputError(f"choose returns int64 tokens {expected}; found {describe(tokens)}")
        return tokens

    def _check_ids(self, chosen: Sequence[int]) -> None:
        """A GPU that looks up a token beyond the vocabulary ends all work of its process."""
        wrong = next((token for token in chosen if not 0 <= token < self.engine.vocabulary), None)
        if wrong is not None:
            raise InputError(f"choose returns token ids of 0 to {self.engine.vocabulary - 1}; found {wrong}")

    def rows_of_graph(self, rows: int) -> int:
        """As for the engine."""
        return self.engine.rows_of_graph(rows)

    def overwrite_cache(self, prompts: torch.Tensor, count: int) -> None:
        """As for the engine."""
        self.engine.overwrite_cache(prompts, count)

    def masks(self, rows: int, size: int) -> RowMasks:
        """Masks for ``rows`` rows, padded to ``size``."""
        pinned = torch.device(self.engine.device).type == "cuda"
        return RowMasks(self.grammar, rows, padded_rows=size - rows, pinned=pinned)

    def choose(self, logits: torch.Tensor, masks: RowMasks, *, graphs: bool = True) -> torch.Tensor:
        """The next tokens, (rows, 1), for logits (rows, vocabulary). The next replay overwrites them."""
        mask = masks.packed.to(self.engine.device, non_blocking=True)
        if graphs and self._graph is not None:
            tokens: torch.Tensor = self._graph(logits, mask)
            return tokens
        return self._checked_choose(logits.clone(), mask)

    def steps(
        self, prompts: torch.Tensor, count: int, *, graphs: bool = True, forced: torch.Tensor | None = None
    ) -> Iterator[Step]:
        """At most ``count`` steps of a generation, until every row has ended. As :meth:`DecodeEngine.steps`."""
        rows, engine = prompts.shape[0], self.engine
        size = self.rows_of_graph(rows) if graphs else rows
        masks = self.masks(rows, size)
        masks.fill()
        step = engine.prefill(engine.padded(prompts, size))
        for at in range(1, count + 1):
            tokens = self.choose(step.logits[:, -1], masks, graphs=graphs)
            yield Step(tokens, step.logits[:, -1:])
            given = tokens if forced is None else engine.padded(forced[:, at - 1 : at], size)
            chosen = given[:rows, 0].tolist()
            self._check_ids(chosen)
            if at == count or masks.ends_with(chosen):
                return
            step = engine.step(given) if graphs else call_decoder(engine.decoder, given)
            # While a GPU computes the step.
            masks.accept(chosen)
            masks.fill()

    def generate(
        self,
        prompts: torch.Tensor,
        count: int,
        *,
        graphs: bool = True,
        forced: torch.Tensor | None = None,
        keep_logits: bool = False,
    ) -> GuidedTokens:
        """At most ``count`` tokens for each row, as :meth:`DecodeEngine.generate`."""
        engine, rows = self.engine, prompts.shape[0]
        engine.check_unchanged()
        before, chosen_before = engine.replays, self._replays
        tokens, logits = [], []
        with engine.running():
            for step in self.steps(prompts, count, graphs=graphs, forced=forced):
                tokens.append(step.tokens[:rows].clone())
                logits += [step.logits[:rows].clone()] if keep_logits else []
        steps = len(tokens)
        return GuidedTokens(
            tokens=_extended(torch.cat(tokens, 1), count, self.grammar.stop_token),
            receipt=engine.receipt(steps - 1, engine.replays - before, rows),
            choices=engine.receipt(steps, self._replays - chosen_before, rows),
            logits=_extended(torch.cat(logits, 1), count, 0) if logits else None,
            steps=steps,
        )

    @property
    def _replays(self) -> int:
        return self._graph.replays if self._graph is not None else 0


def _extended(tensor: torch.Tensor, count: int, value: int) -> torch.Tensor:
    """Up to ``count`` columns."""
    missing = tensor.new_full((tensor.shape[0], count - tensor.shape[1], *tensor.shape[2:]), value)
    return torch.cat((tensor, missing), 1)


def outputs_of(grammar: TokenGrammar, tokens: Sequence[Sequence[int]]) -> tuple[GuidedOutput, ...]:
    """The text of each row, judged by the grammar's parser."""
    return tuple(_output(grammar, each) for each in tokens)


def _output(grammar: TokenGrammar, tokens: Sequence[int]) -> GuidedOutput:
    is_cut = grammar.stop_token not in tokens
    own = tokens if is_cut else tokens[: list(tokens).index(grammar.stop_token)]
    output = text_of(grammar, own)
    problem = "" if is_cut else grammar.grammar.problem(output)
    return GuidedOutput(text=output.decode(errors="replace"), is_cut=is_cut, problem=problem)


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
        step = self._engine.prefill(self._engine.padded(prompts, size))
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
