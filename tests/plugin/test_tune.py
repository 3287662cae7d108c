"""The fixture ``tune``: on the run's device, beside other fixtures, and quiet without ``--cudagraph``."""

import json

TESTS = """
import torch
from models import *

def test_tune(tune, cudagraph):
    report = tune(Mlp().eval(), torch.randn(1, 16), batch_sizes=[1, 2])
    print("best:", report.best and report.best.combination, len(report.combinations))
    cudagraph(Mlp().eval(), torch.randn(1, 16), batch_sizes=[1], min_speedup=0.01)

def test_own_error(tune):
    def broken(x):
        raise ZeroDivisionError("my own")
    tune(broken, torch.randn(1, 16))

def test_wrong(tune):
    tune(Mlp(), torch.randn(1, 16), graph=True)
"""


def test_the_tuner_runs_within_a_test_and_a_models_error_is_shown_at_its_line(project):
    project.pytester.makepyfile(TESTS)
    result = project.measure("--cudagraph-time-budget=0.3", "-s")
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        ["*best: batch * 4", "E *ZeroDivisionError: my own", "E *graph takes a list of *found True"]
    )
    assert "pytest_cudagraph/" not in result.stdout.str()


AFTER = """
import torch
from models import *

def test_good(cudagraph):
    model = Mlp().eval()
    weights = [each.clone() for each in model.parameters()]
    cudagraph(model, torch.randn(1, 16), min_speedup=0.01)
    assert all(map(torch.equal, weights, model.parameters()))

def test_refused(cudagraph):
    cudagraph(ReadsTheHost().eval(), torch.randn(1, 16))

def test_only_twice(cudagraph):
    class Gone(Mlp):
        calls = 0
        def forward(self, x):
            if tuning:
                raise MemoryError("the second time there is no room")
            return super().forward(x)
    import pytest_cudagraph.serving.fixtures as fixture
    tuning, then = False, fixture._tune
    def now(*arguments):
        nonlocal tuning
        tuning = True
        return then(*arguments)
    fixture._tune = now
    try:
        cudagraph(Gone().eval(), torch.randn(1, 16), min_speedup=0.01)
    finally:
        fixture._tune = then
"""


def test_a_model_that_passed_is_tuned_on_request_and_the_summary_has_its_marker(project):
    project.pytester.makepyfile(AFTER)
    result = project.measure("--cudagraph-time-budget=0.3", "--cudagraph-tune", "--cudagraph-json=run.json")
    result.assert_outcomes(passed=2, failed=1)
    file = next(project.path.glob("test_*.py")).name
    result.stdout.fnmatch_lines([
        f"tuned: {file}::test_good: best is batch 2, compile='none', graph*",
        "  GraphRunner(model, [*]inputs, batch_sizes=(1, 2))",
        "  @pytest.mark.graph_speedup(batch_sizes=[[]1, 2[]], compile='none')",
        f"tuned: {file}::test_only_twice: nothing, for MemoryError: the second time there is no room",
    ])  # fmt: skip
    found = json.loads((project.path / "run.json").read_text(encoding="utf-8"))["tuned"]
    assert [each["nodeid"] for each in found] == [f"{file}::test_good", f"{file}::test_only_twice"]
    assert len(found[0]["combinations"]) == 4


def test_without_the_option_the_model_runs_and_nothing_is_measured(project):
    project.pytester.makepyfile(TESTS)
    result = project.run("-s", "-k", "test_tune")
    result.assert_outcomes(passed=1, deselected=2)
    result.stdout.fnmatch_lines(["*best: None 0*"])
