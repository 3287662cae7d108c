"""The figures of a generation, from its stamps, and samples of decode steps that start at one position."""

from __future__ import annotations

import pytest
import torch
from examples.small_decoder import SmallDecoder

from pytest_cudagraph.decoding.engine import DecodeEngine
from pytest_cudagraph.decoding.times import RepeatedSteps, Stamps, summary


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


@pytest.mark.parametrize(("prompt", "expected"), [(5, 8), (60, 4)])
def test_each_sample_of_steps_starts_from_the_same_position(prompt, expected):
    decoder = SmallDecoder().eval()
    with DecodeEngine(decoder, [2]) as engine, torch.inference_mode():
        steps = RepeatedSteps(engine, torch.arange(2 * prompt).view(2, prompt) % 96)
        assert steps.steps == expected
        for arm in (steps.arms().eager, steps.arms().replay, steps.arms().replay):
            steps.rewind()
            assert decoder.position.tolist()[:2] == [prompt, prompt]
            arm()
            assert decoder.position.tolist()[:2] == [prompt + expected] * 2
