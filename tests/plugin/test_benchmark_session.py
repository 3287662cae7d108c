"""The measured arms take part in pytest-benchmark's session: its options do with them what its users expect."""

from __future__ import annotations

import json

import pytest

from pytest_cudagraph.cli import main

GOOD = "cudagraph(Mlp().eval(), torch.randn(1, 16), min_speedup=0.01)"
SLOW = "cudagraph(SlowUnderCapture().eval(), torch.randn(1, 16), min_speedup=0.01)"
WRONG = "cudagraph(WrongUnderCapture().eval(), torch.randn(1, 16))"

ARMS = [f"test_good[{size}-{arm}]" for size in (1, 2) for arm in ("eager", "replay")]


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    # pytest-benchmark looks here whether it runs in a worker. These tests may, the runs in them do not.
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)


def names_in(path):
    # Its oldest release makes the file at the start.
    if not path.exists() or not path.read_text(encoding="utf-8"):
        return []
    return [each["name"] for each in json.loads(path.read_text(encoding="utf-8"))["benchmarks"]]


@pytest.mark.contract
def test_each_arm_of_a_correct_result_is_in_its_json_and_its_table(project):
    project.write(good=GOOD, wrong=WRONG)
    result = project.measure("--benchmark-json=run.json")
    result.assert_outcomes(passed=1, failed=1)
    assert names_in(project.path / "run.json") == ARMS
    result.stdout.fnmatch_lines(["*benchmark 'test_user.py::test_good batch 1': 2 tests*", "test_good?1-replay?*"])
    assert main(["baseline", "show", "run.json"]) == 0


@pytest.mark.contract
def test_a_result_that_failed_is_compared_and_drawn_and_never_saved(project):
    project.write(good=GOOD)
    project.measure("--benchmark-autosave").assert_outcomes(passed=1)
    project.write(good=SLOW, failing=f"{GOOD}\nassert False")
    # In a process of its own: its failure is an exception that leaves pytest.
    options = ("--benchmark-compare", "--benchmark-compare-fail=median:50%", "--benchmark-histogram=drawn")
    result = project.measure("-W", "default", "--benchmark-autosave", *options)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["test_failing?1-replay?*", "test_good?1-replay? (NOW)*"])
    result.stderr.fnmatch_lines(["*PerformanceRegression: *"])
    assert len(list(project.path.glob("drawn*.svg"))) == 4
    _, second = sorted(project.path.glob(".benchmarks/*/*.json"))
    assert names_in(second) == ARMS


def test_a_release_of_it_that_takes_no_arms_costs_no_result_of_ours(project):
    project.write(good=GOOD)
    project.pytester.makeconftest("import pytest_benchmark.stats\npytest_benchmark.stats.Metadata = None")
    result = project.measure("--cudagraph-update", "--junitxml=junit.xml", "--benchmark-json=run.json")
    assert result.ret == pytest.ExitCode.INTERNAL_ERROR
    assert project.baseline.exists()
    assert "test_good" in (project.path / "junit.xml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "options", [(), ("--benchmark-disable", "--benchmark-json=run.json")], ids=["unasked", "disabled"]
)
def test_nothing_is_added_to_its_session(project, options):
    project.write(good=GOOD)
    result = project.measure(*options)
    result.assert_outcomes(passed=1)
    assert "2 tests" not in result.stdout.str()
    assert names_in(project.path / "run.json") == []


@pytest.mark.contract
@pytest.mark.parametrize(("option", "run"), [("--benchmark-only", "test_good"), ("--benchmark-skip", "test_other")])
def test_a_measured_test_is_a_benchmark_for(project, option, run):
    project.write(good=GOOD)
    project.pytester.makepyfile(test_other="def test_other(): pass")
    result = project.measure(option, "-v")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines([f"*::{run} PASSED*"])
