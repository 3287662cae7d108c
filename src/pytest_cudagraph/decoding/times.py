"""The times of generations: TTFT, ITL, TPOT, tokens per second, and samples of decode steps for the speed gate."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from pytest_cudagraph.decoding.engine import DecodeEngine, Step, call_decoder
from pytest_cudagraph.decoding.results import GenerationTimes
from pytest_cudagraph.measure import LEAST_CPU_SHARE, Arms
from pytest_cudagraph.pipeline.device_context import DeviceContext
from pytest_cudagraph.stats import summaries
from pytest_cudagraph.values import Kind, Latency, Medians, Timing

STEPS_PER_SAMPLE = 8
"""On a device one step is too short for a clock and a wait. A whole generation is so long that few samples fit."""

_STEPS_PER_CPU_SAMPLE = 1
"""There eight steps are as long as a scheduler slice: beside other work every sample would hold a wait for a CPU."""

_MOST_GENERATIONS = 25
"""With 5, up to 4 % of unchanged figures failed in simulations of a restless machine, with 25 less than 0.1 %."""
_SHARE = 0.2
"""Of the time budget, for whole generations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamps:
    """When the request of one generation began, and when each token was there, in ns."""

    start_ns: int
    tokens_ns: Sequence[int]

    @property
    def ttft_ns(self) -> float:
        """Time to first token: ``first token - request``."""
        return self.tokens_ns[0] - self.start_ns

    @property
    def itl_ns(self) -> list[float]:
        """Inter-token latencies: the gap before each token but the first, as vLLM's ``benchmarks/serve.py`` has them.

        NVIDIA's aiperf calls these "ICL", and its "ITL" is the :attr:`tpot_ns` of this class.
        """
        return [float(later - earlier) for earlier, later in pairwise(self.tokens_ns)]

    @property
    def tpot_ns(self) -> float:
        """Time per output token: ``(latency - TTFT) / (tokens - 1)``, one number per generation."""
        return (self.tokens_ns[-1] - self.tokens_ns[0]) / (len(self.tokens_ns) - 1)

    def time_per_token_ns(self, rows: int) -> float:
        """``duration / (rows * tokens)``. The duration includes the prefill."""
        return (self.tokens_ns[-1] - self.start_ns) / (rows * len(self.tokens_ns))


def summary(generations: Sequence[Stamps], rows: int) -> GenerationTimes:
    """The times of some generations of the same prompts."""
    gaps_ns = [gap for each in generations for gap in each.itl_ns]
    return GenerationTimes(
        generations=len(generations),
        ttft=summaries.latency_summary([each.ttft_ns for each in generations]),
        itl=summaries.latency_summary(gaps_ns),
        itl_p99_ns=summaries.quantile(gaps_ns, 0.99),
        tpot_ns=summaries.median([each.tpot_ns for each in generations]),
        time_per_token=summaries.latency_summary([each.time_per_token_ns(rows) for each in generations]),
    )


def time_generations(
    engine: DecodeEngine, prompts: torch.Tensor, count: int, device_context: DeviceContext, budget_ns: float
) -> GenerationTimes:
    """Time whole generations by graphs, at most 25 and a fifth of the budget, but one in any case.

    On a CPU those that mostly waited for it are left out, unless all did.
    """
    backend, clock = device_context.backend, device_context.clock
    generations: list[Stamps] = []
    waited: list[Stamps] = []
    begin_ns = clock.now_ns()
    with backend.running():
        while not (generations or waited) or (
            len(generations) < _MOST_GENERATIONS and clock.now_ns() - begin_ns < _SHARE * budget_ns
        ):
            begin_cpu_ns = clock.cpu_time_ns()
            stamps = _stamps(engine, prompts, count, device_context)
            cpu_share = (clock.cpu_time_ns() - begin_cpu_ns) / max(stamps.tokens_ns[-1] - stamps.start_ns, 1)
            has_waited = backend.kind == "cpu" and cpu_share < LEAST_CPU_SHARE
            (waited if has_waited else generations).append(stamps)
    return summary(generations or waited, prompts.shape[0])


def _stamps(engine: DecodeEngine, prompts: torch.Tensor, count: int, device_context: DeviceContext) -> Stamps:
    synchronize, now_ns = device_context.backend.synchronize, device_context.clock.now_ns
    synchronize()
    start_ns, tokens_ns = now_ns(), []
    for _ in engine.steps(prompts, count):
        synchronize()
        tokens_ns.append(now_ns())
    return Stamps(start_ns=start_ns, tokens_ns=tokens_ns)


class RepeatedSteps:
    """Some decode steps from one position, eagerly or by the graph. :meth:`rewind` returns to that position."""

    def __init__(self, engine: DecodeEngine, prompts: torch.Tensor, kind: Kind) -> None:
        """Prefill the prompts. Runs in the backend's mode. On a CPU a sample is one step."""
        self._decoder = engine.decoder
        most = _STEPS_PER_CPU_SAMPLE if kind == "cpu" else STEPS_PER_SAMPLE
        self.steps = min(most, engine.decoder.length - prompts.shape[1])
        self._graph = engine.graph(prompts.shape[0])
        self._first = engine.prefill(prompts).tokens[:, -1:].clone()
        self._moved = 0

    def arms(self) -> Arms:
        """Both run the same steps, and each step gets the token of the one before."""
        eager: Callable[[torch.Tensor], Step] = functools.partial(call_decoder, self._decoder)
        return Arms(eager=functools.partial(self._run, eager), replay=functools.partial(self._run, self._graph))

    def rewind(self) -> None:
        if self._moved:
            self._decoder.rewind(self._moved)
            self._moved = 0

    def _run(self, call: Callable[[torch.Tensor], Step]) -> None:
        tokens = self._first
        for _ in range(self.steps):
            tokens = call(tokens).tokens
        self._moved = self.steps


def per_step(timing: Timing, steps: int) -> Timing:
    """A measurement of samples of ``steps`` steps, as latencies of one step."""

    def shorter(latency: Latency) -> Latency:
        return Latency(
            samples=latency.samples,
            minimum_ns=latency.minimum_ns / steps,
            q25_ns=latency.q25_ns / steps,
            median_ns=latency.median_ns / steps,
            q75_ns=latency.q75_ns / steps,
            q90_ns=latency.q90_ns / steps,
        )

    device_replay = timing.device_replay and shorter(timing.device_replay)
    medians = Medians(eager_ns=timing.medians.eager_ns / steps, replay_ns=timing.medians.replay_ns / steps)
    return replace(
        timing,
        eager=shorter(timing.eager),
        replay=shorter(timing.replay),
        medians=medians,
        device_replay=device_replay,
    )
