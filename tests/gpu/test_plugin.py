"""The whole plugin on a GPU, in a pytest of its own: pass, slow, wrong, refused; the baseline under the GPU's name."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from tests.plugin.conftest import MODELS

import pytest_cudagraph
from pytest_cudagraph import device
from pytest_cudagraph.baseline import slug

DEEP = """

class Deep(nn.Module):
    '''Launch-bound: what a graph is for.'''

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[layer for _ in range(16) for layer in (nn.Linear(16, 16), nn.GELU())])

    def forward(self, x):
        return self.layers(x)
"""
FAST = "cudagraph(Deep().eval(), torch.randn(1, 16))"


@pytest.fixture
def project(pytester, request, monkeypatch):
    """Runs pytest with this plugin as it was loaded here: from the source tree, or as it is installed."""
    source = Path(pytest_cudagraph.__file__).resolve().parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")])))
    # The installed plugin goes by the name of its entry point; loading it twice is an error of pytest's.
    load = [] if request.config.pluginmanager.hasplugin("cudagraph") else ["-p", "pytest_cudagraph.plugin"]
    pytester.makepyfile(models=MODELS + DEEP)

    def run(body, *arguments):
        lines = [f"    {line}" for line in body.splitlines()]
        signature = "def test_one(cudagraph, capture_graphs, assert_replay_close, measure_speedup):"
        pytester.makepyfile(
            test_user="\n".join(["import torch", "from models import *", "torch.manual_seed(0)", signature, *lines])
        )
        options = ["--cudagraph", "--cudagraph-require-gpu", "--cudagraph-batch-sizes=1,4", "--cudagraph-time-budget=5"]
        return pytester.runpytest_subprocess(*load, "-p", "no:cacheprovider", *options, *arguments, timeout=300)

    return run


def document(pytester):
    return json.loads((pytester.path / "run.json").read_text(encoding="utf-8"))


def test_a_launch_bound_model_passes_and_its_baseline_has_the_gpus_name(project, pytester):
    result = project(FAST, "--cudagraph-update", "--cudagraph-json=run.json")
    result.assert_outcomes(passed=1)
    described = device.describe("cuda")
    (path,) = (pytester.path / ".cudagraph").glob("*.json")
    assert path.stem == slug(described)
    saved = json.loads(path.read_text(encoding="utf-8"))
    assert {entry["extra_info"]["cudagraph"]["batch_size"] for entry in saved["benchmarks"]} == {1, 4}
    written = document(pytester)
    assert written["device"]["kind"] == "cuda"
    assert written["device"]["name"] == torch.cuda.get_device_name(0)
    assert [batch["verdict"] for batch in written["tests"][0]["batches"]] == ["passed", "passed"]


def test_a_second_run_finds_the_first_ones_kernels_in_the_baseline(project, pytester):
    project(FAST, "--cudagraph-update").assert_outcomes(passed=1)
    project(FAST, "--cudagraph-max-slowdown=2", "--cudagraph-json=run.json").assert_outcomes(passed=1)
    batch = document(pytester)["tests"][0]["batches"][0]
    assert batch["baseline"] is not None
    assert batch["baseline"]["kernels"] == batch["kernels"]


def test_a_slow_replay_fails_with_the_gpu_in_its_evidence(project):
    result = project("cudagraph(SlowUnderCapture().eval(), torch.randn(1, 16))")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E*SpeedupTooLow*", f"E*{torch.cuda.get_device_name(0)}*"])


def test_a_wrong_replay_fails_and_saves_nothing(project, pytester):
    result = project("cudagraph(WrongUnderCapture().eval(), torch.randn(1, 16))", "--cudagraph-update")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E*ReplayMismatch*"])
    assert not list(pytester.path.glob(".cudagraph/*.json"))


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


def test_a_compiled_story_shows_three_arms(project, pytester):
    result = project(FAST, "--cudagraph-compile=inductor", "--cudagraph-json=run.json", "--cudagraph-batch-sizes=2")
    result.assert_outcomes(passed=1)
    batch = document(pytester)["tests"][0]["batches"][0]
    assert batch["compiled"] is not None
    assert batch["verdict"] == "passed"
