"""The hooks for other plugins: a report, a column, and a rule for a custom operator."""

from __future__ import annotations

import json
import re
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


RAISES = {
    "KeyError('no such owner')": "KeyError: 'no such owner'",
    "pytest.fail('not here')": "Failed: not here",
    "pytest.skip('not now')": "Skipped: not now",
    "sys.exit('enough')": "SystemExit: enough",
}


JUDGE = """
from dataclasses import replace
import pytest
from pytest_cudagraph import Column, Judgement, Table, Verdict

@pytest.hookimpl(wrapper=True)
def pytest_cudagraph_judge(report):
    report = yield
    sizes = Judgement(gate="sizes", verdict=Verdict.FAILED, reason="two batch sizes are needed")
    batches = tuple(replace(batch, judgements=(*batch.judgements, sizes)) for batch in report.batches)
    return replace(report, batches=batches)

def pytest_cudagraph_tables(reports):
    rows = tuple((report.name, str(len(report.batches))) for report in reports)
    return [Table(title="sizes", columns=(Column(title="test", right=False), Column(title="sizes")), rows=rows)]
"""


def test_a_plugin_adds_a_gate_and_a_table(project):
    project.pytester.makeconftest(JUDGE)
    project.write(plain="cudagraph(Mlp().eval(), torch.randn(1, 16), batch_sizes=[1])")
    result = project.measure("--cudagraph-json=run.json")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E *GraphTestFailure: *batch 1: two batch sizes are needed", "sizes", "test * sizes", "*::test_plain * 1"]
    )
    document = json.loads((project.path / "run.json").read_text(encoding="utf-8"))
    assert "sizes" in [table["title"] for table in document["tables"]]


@pytest.mark.parametrize("hook", ["report", "terminal_columns", "tables"])
@pytest.mark.parametrize("raised", RAISES)
def test_a_hook_that_raises_fails_the_run_in_one_line_and_loses_nothing(project, hook, raised):
    code = f"raise {raised}" if "Error" in raised else raised
    project.pytester.makeconftest(f"import pytest, sys\n\ndef pytest_cudagraph_{hook}(config): {code}")
    project.write(plain="cudagraph(Mlp().eval(), torch.randn(1, 16))")
    result = project.measure("--cudagraph-json=run.json", "--junitxml=junit.xml", "--cudagraph-update")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "test_user.py::test_plain * passed",
            f"the hook pytest_cudagraph_{hook} of another plugin raised {RAISES[raised]}",
            "*1 passed in *",
        ]
    )
    assert len(json.loads((project.path / "run.json").read_text(encoding="utf-8"))["tests"]) == 1
    assert "test_plain" in (project.path / "junit.xml").read_text(encoding="utf-8")
    assert project.baseline.is_file()


@pytest.mark.parametrize(
    ("returned", "told"),
    [("[None]", "found None"), ("'abc'", "found 'a'"), ("3", "raised TypeError: 'int' object is not iterable")],
)
def test_what_is_no_column_is_told_and_the_table_is_shown(project, returned, told):
    project.pytester.makeconftest(f"def pytest_cudagraph_terminal_columns(): return {returned}")
    project.write(plain="cudagraph(Mlp().eval(), torch.randn(1, 16))")
    result = project.measure()
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        ["test_user.py::test_plain * passed", f"the hook pytest_cudagraph_terminal_columns *{told}"]
    )


def test_a_column_shows_what_its_cell_raises_and_a_title_of_any_type(project):
    project.pytester.makeconftest(
        """
        import pytest
        from pytest_cudagraph import ReportColumn

        def pytest_cudagraph_terminal_columns():
            return [ReportColumn(title=3, cell=lambda report, batch: pytest.fail("no cell"))]
        """
    )
    project.write(plain="cudagraph(Mlp().eval(), torch.randn(1, 16))")
    result = project.measure()
    assert result.ret == 0
    result.stdout.fnmatch_lines(["test * 3 * verdict", "test_user.py::test_plain * <Failed> *"])


@pytest.mark.parametrize(
    "code",
    [
        "def pytest_cudagraph_backends(config): pytest.fail('no driver')",
        "def pytest_cudagraph_backends(config): return {'toy': lambda: pytest.fail('no driver')}",
        "def pytest_cudagraph_marks(config): pytest.fail('no driver')",
    ],
    ids=["the hook", "its backend", "marks"],
)
def test_what_raises_before_the_first_test_is_one_usage_error(project, code):
    project.pytester.makeconftest(f"import pytest\n\n{code}")
    project.write(plain="cudagraph(Mlp().eval(), torch.randn(1, 16))")
    result = project.run("--cudagraph", "--cudagraph-device=toy")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*the hook pytest_cudagraph_* of another plugin raised Failed: no driver"])


def test_a_rule_that_cannot_be_asked_for_fails_the_test_in_one_line(project):
    project.pytester.makeconftest("import pytest\n\ndef pytest_cudagraph_audit_rules(): pytest.skip('no rules')")
    project.write(plain="cudagraph(Mlp().eval(), torch.randn(1, 16))")
    result = project.measure()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E*the hook pytest_cudagraph_audit_rules of another plugin raised Skipped: no rules"])


def test_an_error_of_the_summary_itself_loses_neither_junit_nor_the_failures(project):
    project.pytester.makeconftest(
        """
        import pytest
        from pytest_cudagraph import summary

        patch = pytest.MonkeyPatch()
        patch.setattr(summary, "end_run", lambda *arguments, **more: 10**400 * 1.0)
        pytest_unconfigure = patch.undo
        """
    )
    project.write(plain="cudagraph(Mlp().eval(), torch.randn(1, 16))", fails="assert False, 'my own'")
    result = project.measure("--junitxml=junit.xml")
    assert result.ret == 1
    told = "the summary of this run could not be made: OverflowError: *; what is missing was not written"
    result.stdout.fnmatch_lines(["*AssertionError: my own", told, "*1 failed, 1 passed in *"])
    assert "test_plain" in (project.path / "junit.xml").read_text(encoding="utf-8")


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


ROOT = Path(__file__).parents[2]
TELL_ACCEPT = [
    ROOT / "docs" / "options.md",
    PAGE,
    ROOT / "CHANGELOG.md",
    ROOT / "src/pytest_cudagraph/settings/parsing.py",
]
STEPS = """
import pytest
from models import *

class Steps(Mlp):
    step = 0

    def forward(self, x):
        self.step += 1
        return super().forward(x) + x.new_zeros(4) * self.step

@pytest.mark.parametrize("used", [pytest.param(True, marks=pytest.mark.graph_speedup(accept=EXAMPLE)), False])
def test_steps(cudagraph, used):
    cudagraph(Steps().eval(), torch.randn(1, 16), batch_sizes=[1], min_speedup=0.001)
"""


@pytest.mark.parametrize("page", TELL_ACCEPT, ids=lambda page: page.name)
def test_a_printed_example_of_accept_lets_a_test_pass_that_failed(project, page):
    (example,) = set(re.findall(r'\{"[a-z-]+": "(?!\{)[^"]+"\}', page.read_text(encoding="utf-8")))
    project.pytester.makepyfile(test_user=STEPS.replace("EXAMPLE", example))
    result = project.measure()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*AuditFailed: *", "test_user.py::test_steps[[]True[]] * passed"])


@pytest.mark.parametrize("junk", ["reason=None", "hazard=['rng']", "hazard=3", "operator=None"])
def test_a_rule_with_values_of_other_types_fails_the_test_in_one_line(project, junk):
    values = {"operator": "'mylib::topk'", "hazard": "'rng'", "reason": "'draws'"} | dict([junk.split("=")])
    rule = ", ".join(f"{name}={value}" for name, value in values.items())
    project.pytester.makeconftest(
        f"from pytest_cudagraph import AuditRule\n\ndef pytest_cudagraph_audit_rules(): return [AuditRule({rule})]"
    )
    project.write(plain="cudagraph(Mlp().eval(), torch.randn(1, 16))")
    result = project.measure()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"E*the {junk.partition('=')[0]} of an audit rule takes *; found *"])
    result.stdout.no_fnmatch_line("*src/pytest_cudagraph*")
