"""A gate finer than the machine's noise is said at collection, with the number; other gates cost nothing."""

from __future__ import annotations

CONFTEST = """
import torch
from pytest_cudagraph.pipeline import noise
from pytest_cudagraph.values import Interval

torch.set_num_threads(1)


def floors(backend, clock, *, budget_s, calls):
    print("measured")
    one = Interval(estimate=1.0, low=0.99, high=1.01)
    return [noise.NoiseFloor(call_ns=2e5, noise_ratio=0.02, apparent=one, detectable_ratio=0.007)]


noise.noise_floors = floors
"""

TESTS = """
import pytest, torch


@pytest.mark.graph_speedup(min=0.001, max_slowdown={gate})
def test_gated(cudagraph):
    cudagraph(torch.nn.Linear(4, 4).eval(), torch.randn(1, 4))
"""


def collected(pytester, gate, *arguments):
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_user=TESTS.format(gate=gate))
    options = ("--cudagraph", "--cudagraph-time-budget=1", "--cudagraph-batch-sizes=1")
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-s", *options, *arguments)


def test_a_gate_below_the_noise_floor_warns_with_the_number(pytester):
    result = collected(pytester, 0.01, "--cudagraph-device=cpu")
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(
        [
            "*FineGateWarning: max_slowdown=0.01 is finer than what this machine can tell: regressions from 1.2 % on "
            "within 1 s (the same call differs from itself by 2.0 %); asked for by test_user.py::test_gated; "
            "give a larger one, or see pytest-cudagraph doctor"
        ]
    )


def test_a_gate_above_the_noise_floor_is_no_warning(pytester):
    result = collected(pytester, 0.04, "--cudagraph-device=cpu")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["measured"])
    assert "FineGateWarning" not in result.stdout.str()


def test_nothing_is_measured_for_the_usual_gates_nor_where_speed_is_not_judged(pytester):
    assert "measured" not in collected(pytester, 0.05, "--cudagraph-device=cpu").outlines
    assert "measured" not in collected(pytester, 0.01).outlines
