"""The mark ``workload``: parametrised cases are ranked at the end of the run, and none is lost."""

import json

TESTS = """
import os, pytest, torch
from models import *

@pytest.mark.workload
@pytest.mark.parametrize("case", ["mlp", "refused", "raises", pytest.param("other", marks=SKIP), "dies"])
def test_models(cudagraph, case):
    if case == "dies":
        os._exit(3)
    if case == "raises":
        raise MemoryError("no room for the weights")
    model = ReadsTheHost() if case == "refused" else Mlp()
    cudagraph(model.eval(), torch.randn(1, 16), batch_sizes=[1], min_speedup=0.01)
""".replace("SKIP", "pytest.mark.skip(reason='not today')")


def test_every_case_of_a_run_is_kept_and_ranked(project):
    project.pytester.makepyfile(TESTS)
    file = next(project.path.glob("test_*.py")).name
    result = project.measure("--cudagraph-json=run.json", "-n1", "--max-worker-restart=0")
    result.assert_outcomes(passed=1, failed=3, skipped=1)
    found = json.loads((project.path / "run.json").read_text(encoding="utf-8"))["workloads"]
    errors = {each["name"]: each["error"] for each in found if each["group"] == f"{file}::test_models"}
    assert errors.pop("refused").startswith("pytest_cudagraph.AuditFailed: ")
    assert errors == {
        "mlp": None,
        "raises": "MemoryError: no room for the weights",
        "dies": "the test did not end",
        "other": "Skipped: not today",
    }
    result.stdout.fnmatch_lines([
        f"workloads: {file}::test_models",
        "workload *batch *rank *by *latency *",
        "mlp *1 *",
        "mlp *1 *",
        "refused *- *graph *",
        "  not captured: *",
        "raises *- *",
        "  MemoryError: no room for the weights",
    ])  # fmt: skip


def test_a_mistake_in_the_mark_is_an_error_of_its_test(project):
    for mark, told in {
        "workload('decoder')": " takes no positional arguments; found 'decoder'; write group='decoder'",
        "workload(groups='decoder')": " does not take groups; it takes: group, name",
        "workload(name='')": ": name takes a non-empty string; found ''",
    }.items():
        project.write(mistaken="pass")
        path = project.path / "test_user.py"
        path.write_text(
            path.read_text(encoding="utf-8").replace("def ", f"@pytest.mark.{mark}\ndef "), encoding="utf-8"
        )
        result = project.run()
        result.assert_outcomes(errors=1)
        result.stdout.fnmatch_lines([f"*@pytest.mark.workload{told}"])


def test_the_mark_needs_a_fixture_whose_results_can_be_ranked(project):
    project.pytester.makepyfile("import pytest\n@pytest.mark.workload\ndef test_a(tmp_path): pass")
    result = project.run()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*@pytest.mark.workload needs a test that uses one of these fixtures: cudagraph, *"])
