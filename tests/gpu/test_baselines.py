"""Baselines of a GPU: recorded, compared, gone on with; never held against those of other hardware."""

from __future__ import annotations

import json

import pytest
import torch

pytestmark = pytest.mark.needs_speed("a baseline is saved only where speed is judged")

GOOD = "cudagraph(Mlp().eval(), torch.randn(1, 16), min_speedup=0.01)"
SLOW = "cudagraph(SlowUnderCapture().eval(), torch.randn(1, 16), min_speedup=0.01)"
GENEROUS = "--cudagraph-max-slowdown=1"
"""Twice as slow: what two sessions of the same code on a GPU never are."""


def saved_devices(project):
    """By batch size, what is saved of the device."""
    records = json.loads(project.baseline.read_text(encoding="utf-8"))["benchmarks"]
    entries = [record["extra_info"]["cudagraph"] for record in records]
    return {entry["batch_size"]: entry["device"] for entry in entries if entry["arm"] == "replay"}


def test_recorded_then_compared_then_slower_and_a_caught_regression_does_not_bless_itself(project):
    project(GOOD, "--cudagraph-update").assert_outcomes(passed=1)
    recorded = project.baseline.read_text(encoding="utf-8")
    project(GOOD, GENEROUS).assert_outcomes(passed=1)
    for arguments in ((), ("--cudagraph-strict",)):
        slower = project(SLOW, GENEROUS, *arguments)
        slower.assert_outcomes(failed=1)
        slower.stdout.fnmatch_lines(["E*SlowerThanBaseline: batch *: replay is * slower than the baseline *"])
        assert project.baseline.read_text(encoding="utf-8") == recorded


def test_new_kernels_are_named_as_cuda_names_them(project):
    project(GOOD, "--cudagraph-update").assert_outcomes(passed=1)
    if project.measured("--cudagraph-max-slowdown=inf")["kernels"] is None:
        pytest.skip("nothing counts the nodes of a graph here: needs torch 2.8 or newer")
    project.write(SLOW, mark="@pytest.mark.graph_speedup(max_new_kernels=0, max_slowdown=float('inf'))")
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E*TooManyKernels: batch *: * -> * kernels: +400 *; this test allows no new one"])


def test_two_processes_save_the_same_of_the_device_and_it_decides_what_may_be_compared(project):
    project(GOOD, "--cudagraph-update").assert_outcomes(passed=1)
    first = saved_devices(project)
    saved = first[1]
    assert saved["kind"] == "cuda"
    assert saved["name"] == torch.cuda.get_device_name(0)
    assert saved["mig"] is None or "MIG" in saved["name"]
    assert saved["power_limit_w"] is None or 50 < saved["power_limit_w"] < 3000
    project(GOOD, GENEROUS, "--cudagraph-update=all").assert_outcomes(passed=1)
    assert saved_devices(project) == first


def test_a_baseline_of_another_gpu_is_not_compared(project):
    project(GOOD, "--cudagraph-update").assert_outcomes(passed=1)
    text, name = project.baseline.read_text(encoding="utf-8"), torch.cuda.get_device_name(0)
    project.baseline.unlink()
    other = project.path / ".cudagraph" / "another-gpu.json"
    other.write_text(text.replace(json.dumps(name), '"Another GPU"'), encoding="utf-8")
    result = project(SLOW)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*not judged*"])
    assert "the baseline is of Another GPU" in project.run("--cudagraph-strict").stdout.str()


def test_a_baseline_under_another_power_limit_is_not_compared(project):
    project(GOOD, "--cudagraph-update").assert_outcomes(passed=1)
    if saved_devices(project)[1]["power_limit_w"] is None:
        pytest.skip("NVML does not tell the power limit here")
    document = json.loads(project.baseline.read_text(encoding="utf-8"))
    for record in document["benchmarks"]:
        if "device" in record["extra_info"]["cudagraph"]:
            record["extra_info"]["cudagraph"]["device"]["power_limit_w"] += 50
    project.baseline.write_text(json.dumps(document), encoding="utf-8")
    result = project(SLOW, "--cudagraph-strict")
    result.assert_outcomes(failed=1)
    assert "power limit" in result.stdout.str()
    assert "SlowerThanBaseline" not in result.stdout.str()
