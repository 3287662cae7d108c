"""On GitHub Actions a run writes the summary of its step, and annotates the lines of its failing tests."""

from __future__ import annotations

import os
import re

import pytest
from tests.plugin.conftest import MODELS
from tests.plugin.test_failing_tests import FAILING

LINES = MODELS.strip().splitlines()
HOST_READ = str(LINES.index("        scale = y.abs().max().item()") + 1)
FIRST_LAYER = str(LINES.index("        return self.second(self.first(x).relu())") + 1)
CALL = "5"
"""The line of the first test's call in a file of ``project.write``."""


@pytest.fixture
def step_summary(project, monkeypatch, tmp_path_factory):
    """The file that GitHub shows. An earlier command of the step has written to it."""
    path = tmp_path_factory.mktemp("runner") / "step_summary.md"
    path.write_text("earlier\n", encoding="utf-8")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(project.path))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
    return path


def annotated(result):
    """File, line and error of each annotation."""
    found = (re.match(r"::error file=(.*),line=(.*),title=.*?::([\w.]*)", line) for line in result.outlines)
    return [match.groups() for match in found if match]


def test_each_failing_test_is_annotated_at_the_users_line(project, step_summary):
    slow = "cudagraph(Mlp().eval(), torch.randn(1, 16), min_speedup=1000)"
    project.write("test_models", slow=slow, host=FAILING["host_read"], eager=FAILING["eager_error"])
    project.pytester.makepyfile(
        test_other=f"""
        import pytest, torch
        from models import *

        @pytest.mark.xfail
        def test_expected(cudagraph):
            {FAILING["host_read"]}

        def test_without_the_plugin():
            assert False
        """
    )
    result = project.measure("--cudagraph-batch-sizes=2")
    result.assert_outcomes(failed=4, xfailed=1)
    assert annotated(result) == [
        ("test_models.py", CALL, "pytest_cudagraph.SpeedupTooLow"),
        ("models.py", HOST_READ, "pytest_cudagraph.AuditFailed"),
        ("models.py", FIRST_LAYER, "RuntimeError"),
    ]
    page = step_summary.read_text(encoding="utf-8")
    assert page.startswith("earlier\n\n## CUDA graphs\n\n### Failed\n\n<details open>")
    assert "1 failed, 3 not captured" in page


def test_the_controller_of_xdist_writes_for_its_workers(project, step_summary, monkeypatch):
    # The project is a folder of the checkout, and so are installed libraries.
    monkeypatch.setenv("GITHUB_WORKSPACE", project.path.anchor)
    project.write("test_models", host=FAILING["host_read"], eager=FAILING["eager_error"])
    result = project.measure("-p", "no:benchmark", "-n", "1")
    file = (project.path / "models.py").relative_to(project.path.anchor).as_posix()
    assert {each[:2] for each in annotated(result)} == {(file, HOST_READ), (file, FIRST_LAYER)}
    page = step_summary.read_text(encoding="utf-8")
    assert (page.count("## CUDA graphs"), page.count("<details")) == (1, 2)


@pytest.mark.parametrize("is_told", [True, False])
def test_off_or_elsewhere_nothing_is_written(project, step_summary, monkeypatch, is_told):
    if not is_told:
        monkeypatch.delenv("GITHUB_ACTIONS")
    project.write(host=FAILING["host_read"])
    result = project.measure(*(["--cudagraph-github=off"] if is_told else []))
    assert annotated(result) == []
    assert step_summary.read_text(encoding="utf-8") == "earlier\n"


@pytest.mark.parametrize("path", ["missing/folder/file.md", ".", "full.md", "pipe"])
def test_a_step_summary_that_cannot_be_written_is_one_warning_and_no_failure(project, step_summary, monkeypatch, path):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", path)
    (project.path / "full.md").write_bytes(b"x" * (1 << 20))
    os.mkfifo(project.path / "pipe")
    project.write(host=f"with pytest.raises(AssertionError):\n    {FAILING['host_read']}")
    result = project.measure()
    assert result.ret == pytest.ExitCode.OK
    told = [line for line in result.outlines if line.startswith("warning: nothing was written to GITHUB_STEP_SUMMARY")]
    assert len(told) == 1
