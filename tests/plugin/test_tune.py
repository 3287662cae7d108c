"""The fixture ``tune``: on the run's device, beside other fixtures, and quiet without ``--cudagraph``."""

TESTS = """
import torch
from models import *

def test_tune(tune, cudagraph):
    report = tune(Mlp().eval(), torch.randn(1, 16), batch_sizes=[1, 2])
    print("best:", report.best and report.best.cell, len(report.cells))
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


def test_without_the_option_the_model_runs_and_nothing_is_measured(project):
    project.pytester.makepyfile(TESTS)
    result = project.run("-s", "-k", "test_tune")
    result.assert_outcomes(passed=1, deselected=2)
    result.stdout.fnmatch_lines(["*best: None 0*"])
