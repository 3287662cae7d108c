"""The hooks for other plugins: a report, a column, and a rule for a custom operator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
CONFTEST = f"""
{PAGE.read_text(encoding="utf-8").partition('title="conftest.py"')[2].partition("```")[0]}

def pytest_unconfigure(config):
    print("seen", seen)
"""

TESTS = """
import torch


def test_scale(cudagraph):
    report = cudagraph(torch.ops.mylib.scale, torch.randn(1, 4), batch_sizes=[1, 2], min_speedup=0.001)
    assert report.not_judged == ()


def test_topk(cudagraph):
    cudagraph(torch.ops.mylib.topk, torch.randn(1, 4), batch_sizes=[1])
"""


@pytest.fixture(scope="module", autouse=True)
def operators():
    """Two operators that no rule of the audit knows."""
    library = torch.library.Library("mylib", "DEF")
    for name in ("scale", "topk"):
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, lambda x: x * 2, "CPU")
    yield
    library._destroy()


def test_a_plugin_sees_reports_adds_columns_and_judges_its_own_operators(project):
    project.pytester.makeconftest(CONFTEST)
    project.pytester.makepyfile(test_user=TESTS)
    result = project.measure()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "E*AuditFailed: test_user.py:*: * [[]dynamic-shape[]]",
            "E*topk: reads its output size on the host",
            "test * target *kernels  owner * verdict",
            "test_u*::test_scale      1 * 0.00x        1  ana * *",
            "  *       2 * 0.00x        1  <KeyError> *",
            "test_u*::test_topk * - * not captured",
            "seen [[]('test_user.py::test_scale', '*'), ('test_user.py::test_topk', 'not-captured')[]]",
        ]
    )


def test_a_hook_that_raises_fails_the_run_in_one_line_and_the_table_is_shown(project):
    project.pytester.makeconftest("def pytest_cudagraph_report(config, report): raise KeyError('no such owner')")
    project.write(plain="cudagraph(Mlp().eval(), torch.randn(1, 16))")
    result = project.measure()
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "test_user.py::test_plain * passed",
            "a hook pytest_cudagraph_* of another plugin raised KeyError: 'no such owner'",
        ]
    )


def test_a_rule_for_a_hazard_that_does_not_exist_is_refused(project):
    project.pytester.makeconftest(CONFTEST.replace('"dynamic-shape"', '"slow"'))
    project.pytester.makepyfile(test_user=TESTS)
    result = project.measure("-k", "scale")
    result.assert_outcomes(failed=1, deselected=1)
    result.stdout.fnmatch_lines(["E*the hazard of an audit rule takes ids of hazards: *; found 'slow'"])


BACKEND = PAGE.read_text(encoding="utf-8").partition("## A backend")[2].partition("```python")[2].partition("```")[0]


def test_a_plugin_brings_a_backend_that_option_and_marker_name_and_whose_speed_is_judged_and_saved(project):
    project.pytester.makeconftest(BACKEND)
    project.write(plain="assert cudagraph(Mlp().eval(), torch.randn(1, 16), min_speedup=0.001).device.kind == 'toy'")
    options = ("--cudagraph", "--cudagraph-batch-sizes=1", "--cudagraph-device=toy")
    project.run(*options, "--cudagraph-update").assert_outcomes(passed=1)
    again = project.run(*options, "--cudagraph-max-slowdown=inf")
    again.stdout.fnmatch_lines(["cudagraph: Toy 1, torch *; baseline .cudagraph/toy-1.json; gate 1.15x", "1 passed"])
    project.pytester.makepyfile(
        test_user="""
        import pytest, torch

        @pytest.mark.graph_speedup(device="toy", min=0.001)
        def test_marked(cudagraph):
            assert cudagraph(torch.nn.Linear(4, 4).eval(), torch.randn(1, 4)).device.name == "Toy 1"
        """
    )
    project.run("--cudagraph", "--cudagraph-batch-sizes=1").assert_outcomes(passed=1)
    refused = project.run("--cudagraph", "--cudagraph-device=tpu")
    refused.stderr.fnmatch_lines(["*--cudagraph-device takes one of auto, cuda, cpu, toy; found 'tpu'"])


ADDS = """
def pytest_cudagraph_model_passed(context, call, report):
    context.add("sizes", {"name": report.name, "sizes": len(report.batches)}, [f"sizes: {len(report.batches)}"])
"""

ADDING_TESTS = """
import torch

def test_passes(cudagraph):
    cudagraph(torch.nn.Linear(2, 2).eval(), torch.randn(1, 2), batch_sizes=[1], min_speedup=0.001)

def test_fails(cudagraph):
    cudagraph(torch.nn.Linear(2, 2).eval(), torch.randn(1, 2), batch_sizes=[1], min_speedup=1e6)
"""


@pytest.mark.parametrize("workers", [(), ("-n1",)], ids=["alone", "xdist"])
def test_a_plugin_adds_to_the_document_and_the_summary_for_a_model_that_passed(project, workers):
    project.pytester.makeconftest(ADDS)
    project.pytester.makepyfile(test_user=ADDING_TESTS)
    result = project.measure("--cudagraph-json=run.json", *workers)
    result.assert_outcomes(passed=1, failed=1)
    assert result.stdout.lines.count("sizes: 1") == 1
    document = json.loads((project.path / "run.json").read_text(encoding="utf-8"))
    name = "test_user.py::test_passes"
    assert document["sizes"] == [{"nodeid": name, "name": name, "sizes": 1}]
