"""The figures of a generation, from its stamps, and samples of decode steps that start at one position."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from examples.small_decoder import SmallDecoder
from tests.fake_clock import FakeClock

from pytest_cudagraph.decoding.engine import DecodeEngine, Step
from pytest_cudagraph.decoding.times import RepeatedSteps, Stamps, per_step, summary, time_generations
from pytest_cudagraph.measure import Bounds, measure_arms
from pytest_cudagraph.stats import FixedTimeRule


def test_ttft_itl_tpot_and_tokens_per_second_follow_their_formulas():
    stamps = Stamps(start_ns=1_000, tokens_ns=[5_000, 6_000, 8_000, 9_000])
    assert (stamps.ttft_ns, stamps.itl_ns) == (4_000, [1_000, 2_000, 1_000])
    assert stamps.tpot_ns == pytest.approx(4_000 / 3)
    assert stamps.time_per_token_ns(rows=2) == pytest.approx(8000 / (2 * 4))


def test_a_summary_takes_medians_over_generations_and_pools_their_gaps():
    slow = Stamps(start_ns=0, tokens_ns=[9_000, 19_000, 29_000])
    quick = Stamps(start_ns=0, tokens_ns=[3_000, 4_000, 5_000])
    times = summary([quick, slow, quick], rows=1)
    assert (times.generations, times.ttft.median_ns, times.itl.samples) == (3, 3_000, 6)
    assert (times.itl.median_ns, times.itl_p99_ns, times.tpot_ns) == (1_000, 10_000, 1_000)
    assert times.tokens_per_second == pytest.approx(3 / 5e-6)


@pytest.mark.parametrize(("kind", "prompt", "expected"), [("cuda", 5, 8), ("cuda", 60, 4), ("cpu", 5, 1)])
def test_each_sample_of_steps_starts_from_the_same_position(kind, prompt, expected):
    decoder = SmallDecoder().eval()
    with DecodeEngine(decoder, [2]) as engine, torch.inference_mode():
        steps = RepeatedSteps(engine, torch.arange(2 * prompt).view(2, prompt) % 96, kind)
        assert steps.steps == expected
        for arm in (steps.arms().eager, steps.arms().replay, steps.arms().replay):
            steps.rewind()
            assert decoder.position.tolist()[:2] == [prompt, prompt]
            arm()
            assert decoder.position.tolist()[:2] == [prompt + expected] * 2


STEP_NS, PREFILL_NS, SLICE_NS, S = 0.5e6, 2e6, 4e6, 1e9


class SharedClock(FakeClock):
    """After each scheduler slice of its own work a thread waits: ``wait_ns(time)`` for others."""

    def __init__(self, wait_ns):
        super().__init__()
        self.wait_ns, self.worked_ns = wait_ns, 0.0

    def work(self, ns):
        slices = self.worked_ns // SLICE_NS
        self.worked_ns += ns
        self.time_ns += ns
        if self.worked_ns // SLICE_NS > slices:
            self.time_ns += self.wait_ns(self.time_ns)

    def cpu_time_ns(self):
        return round(self.worked_ns)


class TimedEngine:
    """A decoder, its graph and its engine: each step takes half a millisecond of a shared clock."""

    length = 64

    def __init__(self, clock):
        self.clock, self.decoder = clock, self

    def __call__(self, tokens):
        self.clock.work(STEP_NS)
        return torch.zeros(1, 1, 4)

    def rewind(self, count):
        pass

    def graph(self, rows):
        return lambda tokens: self.step()

    def prefill(self, prompts):
        return self.step(PREFILL_NS)

    def step(self, ns=STEP_NS):
        self.clock.work(ns)
        return Step(tokens=torch.zeros(1, 1, dtype=torch.int64), logits=torch.zeros(1, 1, 4))

    def steps(self, prompts, count):
        yield self.prefill(prompts)
        for _ in range(count - 1):
            yield self.step()


def timed(wait_ns, kind="cpu"):
    """The latency of a step, and the times of generations, on one clock."""
    clock, prompts = SharedClock(wait_ns), torch.zeros(1, 4, dtype=torch.int64)
    engine = TimedEngine(clock)
    backend = SimpleNamespace(kind=kind, running=nullcontext, synchronize=lambda: None)
    times = time_generations(engine, prompts, 12, SimpleNamespace(backend=backend, clock=clock), 5 * S)
    steps = RepeatedSteps(engine, prompts, kind)
    timing = measure_arms(steps.arms(), clock=clock, rule=FixedTimeRule(time_ns=S), bounds=Bounds.of_budget(10 * S),
                          seed=1, prepare=steps.rewind, cpu_time_ns=clock.cpu_time_ns)  # fmt: skip
    return per_step(timing, steps.steps), times


def test_beside_other_work_a_step_takes_as_long_as_the_gap_between_tokens():
    timing, times = timed(lambda time_ns: SLICE_NS)
    assert times.itl.median_ns == pytest.approx(STEP_NS)
    assert timing.medians.replay_ns == pytest.approx(STEP_NS, rel=0.01)


def comes_and_goes(time_ns):
    """Others take seven eighths of the CPU for 270 ms, and none for 30 ms."""
    return 7 * SLICE_NS if time_ns % 300e6 < 270e6 else 0.0


def test_a_load_that_comes_and_goes_moves_no_figure():
    quiet, at_rest = timed(lambda time_ns: 0.0)
    timing, times = timed(comes_and_goes)
    assert timing.medians.replay_ns == pytest.approx(quiet.medians.replay_ns, rel=0.01)
    for name, latency in at_rest.figures().items():
        assert times.figures()[name].median_ns == pytest.approx(latency.median_ns, rel=0.01), name
    assert times.generations >= 3


def test_generations_that_all_waited_are_still_told():
    _, times = timed(lambda time_ns: 30 * SLICE_NS)
    assert times.generations >= 1


def test_a_host_that_waits_for_its_gpu_keeps_every_generation():
    assert timed(comes_and_goes, kind="cuda")[1].generations > timed(comes_and_goes)[1].generations
