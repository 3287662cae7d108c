"""The whole plugin on a GPU, in a pytest of its own: pass, slow, wrong, refused; the baseline under the GPU's name."""

from __future__ import annotations

import ast
import json
import re

import pytest
import torch

from pytest_cudagraph import device
from pytest_cudagraph.baseline import slug

FAST = "cudagraph(Deep().eval(), torch.randn(1, 16))"


@pytest.mark.needs_speed("a baseline is saved only where speed is judged")
def test_a_launch_bound_model_passes_and_its_baseline_has_the_gpus_name(project):
    result = project(FAST, "--cudagraph-update", "--cudagraph-json=run.json")
    result.assert_outcomes(passed=1)
    assert project.baseline.stem == slug(device.describe("cuda"))
    saved = json.loads(project.baseline.read_text(encoding="utf-8"))
    assert {entry["extra_info"]["cudagraph"]["batch_size"] for entry in saved["benchmarks"]} == {1, 4}
    written = project.document
    assert written["device"]["kind"] == "cuda"
    assert written["device"]["name"] == torch.cuda.get_device_name(0)
    assert [batch["verdict"] for batch in written["tests"][0]["batches"]] == ["passed", "passed"]


@pytest.mark.needs_speed("a baseline is saved only where speed is judged")
def test_a_second_run_finds_the_first_ones_kernels_in_the_baseline(project):
    project(FAST, "--cudagraph-update").assert_outcomes(passed=1)
    project(FAST, "--cudagraph-max-slowdown=inf", "--cudagraph-json=run.json").assert_outcomes(passed=1)
    batch = project.document["tests"][0]["batches"][0]
    assert batch["baseline"] is not None
    assert batch["baseline"]["kernels"] == batch["kernels"]


@pytest.mark.needs_speed("a slow replay fails only where speed is judged")
def test_a_slow_replay_fails_with_the_gpu_in_its_evidence(project):
    result = project("cudagraph(SlowUnderCapture().eval(), torch.randn(1, 16))")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E*SpeedupTooLow*", f"E*{torch.cuda.get_device_name(0)}*"])


def test_a_wrong_replay_fails_and_saves_nothing(project):
    result = project("cudagraph(WrongUnderCapture().eval(), torch.randn(1, 16))", "--cudagraph-update")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E*ReplayMismatch*"])
    assert not list(project.path.glob(".cudagraph/*.json"))


def test_a_model_that_reads_the_host_fails_in_the_audit(project):
    result = project("cudagraph(ReadsTheHost().eval(), torch.randn(1, 16))")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E*AuditFailed*[[]host-sync]"])


def test_a_refused_capture_says_what_cuda_says_and_is_no_quiet_fallback(project):
    result = project("capture_graphs(ReadsTheHost().eval(), torch.randn(1, 16), batch_sizes=[2])")
    result.assert_outcomes(failed=1)
    text = result.stdout.str()
    assert "CaptureFailed" in text
    assert "operation not permitted when stream is capturing" in text
    assert re.search(r"models\.py:\d+", text)


def test_a_test_after_a_refused_one_is_measured_as_ever(project, pytester):
    pytester.makepyfile(
        test_before="""
        import torch
        from models import *

        def test_refused(capture_graphs):
            capture_graphs(ReadsTheHost().eval(), torch.randn(1, 16), batch_sizes=[2])
        """
    )
    project(FAST).assert_outcomes(passed=1, failed=1)


def test_the_stages_one_by_one(project):
    body = """
graphs = capture_graphs(Deep().eval(), torch.randn(1, 16))
assert_replay_close(graphs)
report = measure_speedup(graphs)
assert report.at(1).receipt.capture_ns > 0
assert report.at(1).timing.device_replay is not None
""".strip()
    project(body).assert_outcomes(passed=1)


@pytest.mark.needs_triton("Inductor compiles for CUDA with Triton")
def test_a_compiled_story_shows_three_arms(project):
    result = project(FAST, "--cudagraph-compile=inductor", "--cudagraph-json=run.json", "--cudagraph-batch-sizes=2")
    result.assert_outcomes(passed=1)
    batch = project.document["tests"][0]["batches"][0]
    assert batch["compiled"] is not None
    assert batch["verdict"] == "passed"


@pytest.mark.needs_speed("a verdict needs a speed that is judged")
def test_a_verdict_rests_on_a_device_that_was_its_own(project):
    """Where this fails, the card of the run says what held the GPU."""
    body = f"with PerfMonitor() as watch:\n    {FAST}\nprint(*watch.card.lines(), sep='\\n')"
    project.write(body, mark="from pytest_cudagraph.monitor import PerfMonitor")
    result = project.run("-s", "--cudagraph-json=run.json")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"GPU 0 {torch.cuda.get_device_name(0)}: *"])
    assert "shared with" not in result.stdout.str()
    assert [batch["verdict"] for batch in project.document["tests"][0]["batches"]] == ["passed", "passed"]


def test_the_reference_workload_is_timed_beside_the_model(project):
    project(FAST, "--cudagraph-json=run.json").assert_outcomes(passed=1)
    for batch in project.document["tests"][0]["batches"]:
        assert 0 < batch["reference"]["q25"] < 0.01, batch


@pytest.mark.needs_speed("a speedup is too low only where speed is judged")
def test_what_the_device_bounds_is_told_with_what_a_graph_could_gain_at_most(project):
    """Events tell the time of the kernels alone: a millisecond here, beside which launching them is nothing."""
    result = project("cudagraph(Waits(), torch.randn(1, 16), min_speedup=1.5)")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E*SpeedupTooLow*", "E*x of at most *x: compute-bound; * by themselves"])


@pytest.mark.needs_speed("a speedup is too low only where speed is judged")
def test_what_launching_bounds_is_told_with_the_share_that_was_gained(project):
    result = project(FAST.removesuffix(")") + ", min_speedup=500)")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E*SpeedupTooLow*", "E*x of at most *x*; * kernels take * by themselves"])


@pytest.mark.needs_speed("a marker is suggested only where speed is judged")
def test_a_marker_is_suggested_that_this_run_would_have_met(project):
    result = project(FAST, "--cudagraph-suggest", "--cudagraph-json=run.json")
    result.assert_outcomes(passed=1)
    (line,) = (line for line in result.outlines if line.startswith("suggest: "))
    found = re.fullmatch(r"suggest: test_user\.py::test_one: @pytest\.mark\.graph_speedup\(min=(.+)\)", line)
    assert found, line
    least = ast.literal_eval(found[1])
    for batch in project.document["tests"][0]["batches"]:
        asked = least[batch["batch_size"]] if isinstance(least, dict) else least
        assert 1 < asked < batch["speedup"]["low"], (line, batch)
