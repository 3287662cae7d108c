"""A gate finer than the machine's noise is said at collection, with the number; other gates cost nothing."""

from __future__ import annotations

CONFTEST = """
import pytest
from pytest_cudagraph.pipeline import noise_floor
from pytest_cudagraph.values import Interval


def floors(backend, clock, *, budget_s, calls):
    print("measured")
    one = Interval(estimate=1.0, low=0.99, high=1.01)
    # A second holds as many blocks as find 0.7 % at this noise.
    return [
        noise_floor.NoiseFloor(call_ns=2e5, noise_ratio=0.02, apparent=one, detectable_ratio=0.007, blocks_per_s=244.6)
    ]


patch = pytest.MonkeyPatch()
patch.setattr(noise_floor, "noise_floors", floors)
pytest_unconfigure = patch.undo
"""

TESTS = """
import pytest, torch


@pytest.mark.graph_speedup(min=0.001, max_slowdown={gate})
def test_gated(cudagraph):
    cudagraph(torch.nn.Linear(4, 4).eval(), torch.randn(1, 4))
"""


def collected(project, gate, *arguments):
    project.pytester.makeconftest(CONFTEST)
    project.pytester.makepyfile(test_user=TESTS.format(gate=gate))
    options = ("--cudagraph", "--cudagraph-time-budget=1", "--cudagraph-batch-sizes=1")
    return project.run("-s", *options, *arguments)


def test_a_gate_below_the_noise_floor_warns_with_the_number(project):
    result = collected(project, 0.01, "--cudagraph-device=cpu")
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(
        [
            "*FineGateWarning: max_slowdown=0.01 is finer than what this machine can tell: regressions from 1.2 % on "
            "within 1 s (the same call differs from itself by 2.0 %); asked for by test_user.py::test_gated; "
            "give a larger one, or see pytest-cudagraph doctor"
        ]
    )


def test_a_gate_above_the_noise_floor_is_no_warning(project):
    result = collected(project, 0.04, "--cudagraph-device=cpu")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["measured"])
    assert "FineGateWarning" not in result.stdout.str()


def test_nothing_is_measured_for_the_usual_gates_nor_where_speed_is_not_judged(project):
    assert "measured" not in collected(project, 0.05, "--cudagraph-device=cpu").outlines
    assert "measured" not in collected(project, 0.01).outlines


def test_a_marker_s_own_budget_decides_what_can_be_told(project):
    """A hundredth of the time finds a difference ten times as large; more time a smaller one."""
    project.pytester.makeconftest(CONFTEST)
    body = "def test_{}(cudagraph):\n    cudagraph(torch.nn.Linear(4, 4).eval(), torch.randn(1, 4))\n"
    mark = "@pytest.mark.graph_speedup(min=0.001, max_slowdown=0.01, time_budget={})\n"
    tests = [
        mark.format(budget) + body.format(name)
        for name, budget in (("long", 4), ("short", 0.25), ("brief", 0.25), ("none", 0.004))
    ]
    project.pytester.makepyfile(test_user="import pytest, torch\n\n" + "\n".join(tests))
    options = ("--cudagraph", "--cudagraph-time-budget=1", "--cudagraph-batch-sizes=1", "--cudagraph-device=cpu")
    result = project.run("-s", *options)
    assert result.parseoutcomes()["passed"] == 4
    assert sum("FineGateWarning: " in line for line in result.outlines) == 2
    assert result.outlines.count("measured") == 1
    result.stdout.fnmatch_lines(
        [
            "*FineGateWarning: max_slowdown=0.01 is finer than what this machine can tell: regressions from 1.9 % on "
            "within 0.25 s (the same call differs from itself by 2.0 %); asked for by test_user.py::test_short, "
            "test_user.py::test_brief; give a larger one, or see pytest-cudagraph doctor",
            "*FineGateWarning: max_slowdown=0.01 is finer than what this machine can tell: nothing within 0.004 s (the "
            "same call differs from itself by 2.0 %); asked for by test_user.py::test_none; give a larger one, or see "
            "pytest-cudagraph doctor",
        ]
    )
