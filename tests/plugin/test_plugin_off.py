"""Without --cudagraph the models run, once per batch size, and nothing else happens."""

from __future__ import annotations

import pytest

COUNTS = """
class Counts(Mlp):
    sizes = []

    def forward(self, x):
        self.sizes.append(len(x))
        return super().forward(x)

model = Counts().eval()
report = cudagraph(model, torch.randn(1, 16))
assert model.sizes == [1, 2, 4, 8]
assert report.batches == ()
assert report.verdict.value == "not-judged"
"""


def test_the_model_runs_once_per_batch_size(project):
    project.write(counts=COUNTS)
    result = project.run("--cudagraph-update", "--cudagraph-json=run.json")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["cudagraph: without --cudagraph nothing is measured or written: --cudagraph-update, --cudagraph-json"]
    )
    assert not (project.path / ".cudagraph").exists()
    assert not (project.path / "run.json").exists()


def test_nothing_is_said(project):
    project.write(plain="cudagraph(Mlp().eval(), torch.randn(1, 16))")
    assert "cudagraph:" not in project.run().stdout.str()


def test_a_model_that_raises_still_fails(project):
    project.write(raises="cudagraph(Mlp().eval(), torch.randn(1, 3))")
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E*RuntimeError: *", "E*cudagraph: the model fails by itself, without any graph"])


def test_the_stage_fixtures_hand_out_the_eager_model(project):
    project.pytester.makepyfile(
        """
        import torch
        from models import *

        def test_stages(compile_model, capture_graphs, assert_replay_close, measure_speedup, perf_monitor):
            model, x = Mlp().eval(), torch.randn(1, 16)
            with perf_monitor():
                compiled = compile_model(model, x, mode="inductor", batch_sizes=[1, 2])
                graphs = capture_graphs(compiled, x, batch_sizes=[1, 2])
            assert list(graphs) == [1, 2]
            torch.testing.assert_close(graphs[2](torch.ones(2, 16)), model(torch.ones(2, 16)))
            assert assert_replay_close(graphs) == {}
            assert measure_speedup(graphs).verdict.value == "not-judged"
        """
    )
    project.run().assert_outcomes(passed=1)


@pytest.mark.contract
def test_the_plugin_can_be_left_out(project):
    project.pytester.makepyfile("def test_plain(): pass")
    project.run("-p", "no:cudagraph").assert_outcomes(passed=1)


@pytest.mark.contract
def test_torch_is_not_imported_by_an_idle_plugin(project):
    project.pytester.makepyfile(
        """
        import sys

        def test_plain(pytestconfig):
            assert pytestconfig.pluginmanager.has_plugin("cudagraph")
            assert "torch" not in sys.modules
            assert "pynvml" not in sys.modules
        """
    )
    project.run_alone("--cudagraph").assert_outcomes(passed=1)
