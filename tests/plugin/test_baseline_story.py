"""Baselines as a user lives with them: recorded on request, compared, read by other tools, never lost."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

GOOD = "cudagraph(Mlp().eval(), torch.randn(1, 16), min_speedup=0.01)"
SLOW = "cudagraph(SlowUnderCapture().eval(), torch.randn(1, 16), min_speedup=0.01)"


GATED = """
import pytest, torch
from models import *

@pytest.mark.graph_speedup(max_new_kernels=0, max_slowdown=float("inf"))
def test_good(cudagraph):
    {body}
"""


def test_nothing_is_written_unless_asked(project):
    project.write(good=GOOD)
    result = project.measure()
    result.assert_outcomes(passed=1)
    assert not (project.path / ".cudagraph").exists()
    result.stdout.fnmatch_lines(["*2 passed, 2 no baseline yet*"])


def test_new_kernels_fail_where_the_marker_gates_them(project):
    project.write(good=GOOD)
    project.measure("--cudagraph-update").assert_outcomes(passed=1)
    project.pytester.makepyfile(test_user=GATED.format(body=SLOW))
    result = project.measure()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E*TooManyKernels: batch *: * -> * kernels: +400 aten.mul; this test allows no new one"]
    )


def test_the_twins_kernels_are_held_against_the_file_of_another_cpu(project):
    project.write(good=GOOD)
    project.measure("--cudagraph-update").assert_outcomes(passed=1)
    text = project.baseline.read_text(encoding="utf-8")
    name = next(iter(re.findall(r'"name": "([^"]+)",\n\s+"platform"', text)))
    project.baseline.unlink()
    other = project.path / ".cudagraph" / "cpu-another.json"
    other.write_text(text.replace(name, "Another CPU"), encoding="utf-8")

    project.pytester.makepyfile(test_user=GATED.format(body=GOOD))
    project.run("--cudagraph", "--cudagraph-batch-sizes=1,2").assert_outcomes(passed=1)

    project.pytester.makepyfile(test_user=GATED.format(body=SLOW))
    result = project.run("--cudagraph", "--cudagraph-batch-sizes=1,2")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E*TooManyKernels: batch *: * -> * kernels: +400 aten.mul; this test allows no new one",
            "E*the baseline's were counted on Another CPU",
        ]
    )


def test_an_update_in_a_rehearsal_accepts_nothing_and_says_what_would(project):
    project.write(good=GOOD)
    project.measure("--cudagraph-update").assert_outcomes(passed=1)
    recorded = project.baseline.read_text(encoding="utf-8")
    project.pytester.makepyfile(test_user=GATED.format(body=SLOW))
    result = project.run("--cudagraph", "--cudagraph-batch-sizes=1,2", "--cudagraph-update")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E*to accept: @pytest.mark.graph_speedup(max_new_kernels=400), or "
            "pytest test_user.py::test_good --cudagraph --cudagraph-device=cpu --cudagraph-update"
        ]
    )
    assert project.baseline.read_text(encoding="utf-8") == recorded


def test_a_file_of_another_schema_stops_the_run_and_stays_as_it_is(project):
    project.write(good=GOOD)
    project.measure("--cudagraph-update").assert_outcomes(passed=1)
    old = project.baseline.read_text(encoding="utf-8").replace('"schema": 2', '"schema": 1')
    project.baseline.write_text(old, encoding="utf-8")

    result = project.measure("--cudagraph-update")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: *.json: record 1 has schema 1, this pytest-cudagraph reads schema 2: *"])
    assert project.baseline.read_text(encoding="utf-8") == old


def test_pytest_benchmark_reads_the_file(project, tmp_path):
    project.write(good=GOOD)
    project.measure("--cudagraph-update")
    # Elsewhere than in the project: its oldest release cannot import a conftest under a newer pytest.
    command = [sys.executable, "-m", "pytest_benchmark", "compare", str(project.baseline)]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "replay" in found.stdout
    assert "eager" in found.stdout


def test_what_a_test_measured_before_it_failed_is_not_written(project):
    project.write(fails_later=GOOD + "\nassert False")
    project.measure("--cudagraph-update").assert_outcomes(failed=1)
    assert not list(project.path.glob(".cudagraph/*.json"))


@pytest.mark.skipif(pytest.version_tuple < (9,), reason="subtests came with pytest 9")
def test_a_test_with_a_failed_subtest_is_not_written(project):
    project.pytester.makepyfile(
        """
        import torch
        from models import *

        def test_parts(cudagraph, subtests):
            for name, least in ("bad", 1000), ("good", 0.01):
                with subtests.test(name):
                    cudagraph(Mlp().eval(), torch.randn(1, 16), min_speedup=least, batch_sizes=[1], name=name)
        """
    )
    result = project.measure("--cudagraph-update")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["good * passed"])
    assert not list(project.path.glob(".cudagraph/*.json"))


# What pytest-rerunfailures does, in its own words: the protocol once more, and what failed at first is logged as rerun.
RERUNS = """
from _pytest.runner import runtestprotocol

def pytest_runtest_protocol(item, nextitem):
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in runtestprotocol(item, nextitem=nextitem, log=False):
        report.outcome = "rerun" if report.failed else report.outcome
        item.ihook.pytest_runtest_logreport(report=report)
    item._initrequest()
    runtestprotocol(item, nextitem=nextitem, log=True)
    return True
"""


def test_a_rerun_that_passes_is_written(project):
    with (project.path / "conftest.py").open("a", encoding="utf-8") as file:
        file.write(RERUNS)
    project.write(flaky=f"{GOOD}\nruns = globals().setdefault('RUNS', [])\nruns.append(1)\nassert len(runs) > 1")
    project.measure("--cudagraph-update").stdout.fnmatch_lines(["*wrote 2 entries to *"])


@pytest.mark.parametrize("options", [(), pytest.param(("-n", "1"), marks=pytest.mark.contract)])
def test_of_a_test_that_is_run_again_the_last_attempt_counts(project, options):
    with (project.path / "conftest.py").open("a", encoding="utf-8") as file:
        file.write(RERUNS)
    last = "cudagraph(Mlp().eval() if RUNS else ReadsTheHost(), torch.randn(1, 16), min_speedup=0.001)"
    runs = "runs = globals().setdefault('RUNS', [])"
    project.write(
        mended=f"{runs}\ntry:\n    {last}\nfinally:\n    runs.append(1)",
        other="cudagraph(Mlp().eval(), torch.randn(1, 16), min_speedup=0.001)",
    )
    result = project.measure("--cudagraph-json=run.json", *options)
    told = [line for line in result.outlines if "::test_mended" in line and " not captured" in line]
    assert not told
    tests = json.loads((project.path / "run.json").read_text(encoding="utf-8"))["tests"]
    assert [test["name"].partition("::")[2] for test in tests] == ["test_mended", "test_other"]
    assert all(len(test["batches"]) == 2 for test in tests)


def test_a_partial_run_keeps_the_others_entries(project):
    project.write(good=GOOD, other=GOOD)
    project.measure("--cudagraph-update")
    before = {record["fullname"] for record in json.loads(project.baseline.read_text())["benchmarks"]}
    result = project.measure("--cudagraph-update=all", "-k", "good")
    result.assert_outcomes(passed=1, deselected=1)
    assert " stale" not in result.stdout.str()
    assert {record["fullname"] for record in json.loads(project.baseline.read_text())["benchmarks"]} == before


def test_a_deleted_test_leaves_a_stale_entry_that_strict_refuses(project):
    project.write(good=GOOD, other=GOOD)
    project.measure("--cudagraph-update")
    project.write(good=GOOD)
    lenient = project.measure("--cudagraph-max-slowdown=inf")
    assert lenient.ret == pytest.ExitCode.OK
    lenient.stdout.fnmatch_lines(["*2 stale*"])
    assert project.measure("--cudagraph-strict", "--cudagraph-max-slowdown=inf").ret == pytest.ExitCode.TESTS_FAILED


def test_strict_refuses_a_missing_entry(project):
    project.write(good=GOOD)
    result = project.measure("--cudagraph-strict")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E*NotProven: *"])


def test_a_baseline_of_another_device_is_not_compared(project):
    project.write(good=GOOD)
    project.measure("--cudagraph-update")
    text = project.baseline.read_text(encoding="utf-8")
    records = [record["extra_info"]["cudagraph"] for record in json.loads(text)["benchmarks"]]
    name = next(record["device"]["name"] for record in records if "device" in record)
    project.baseline.unlink()
    (project.path / ".cudagraph" / "other.json").write_text(text.replace(name, "Another Machine"), encoding="utf-8")
    result = project.measure()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*not judged*"])
    assert "Another Machine" in result.stdout.str()
    project.measure("--cudagraph-strict").assert_outcomes(failed=1)


def test_a_file_that_cannot_be_written_is_named_and_stays_whole(project):
    project.write(good=GOOD)
    project.measure("--cudagraph-update")
    before = project.baseline.read_text(encoding="utf-8")
    with (project.path / "conftest.py").open("a", encoding="utf-8") as file:
        # Root writes into read-only folders, so the disk is filled where the file is put in place.
        file.write(
            "\nimport errno, os, pathlib, pytest\n"
            "def full(self, target):\n"
            "    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))\n"
            "patch = pytest.MonkeyPatch()\n"
            "patch.setattr(pathlib.Path, 'replace', full)\n"
            "pytest_unconfigure = patch.undo\n"
        )
    result = project.measure("--cudagraph-update=all")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [f"*{project.baseline.name}: cannot be written (No space left on device); nothing was changed"]
    )
    assert project.baseline.read_text(encoding="utf-8") == before


def test_an_interrupt_leaves_the_baseline_untouched(project):
    project.write(good=GOOD, stopped="def stop(x):\n    raise KeyboardInterrupt\ncudagraph(stop, torch.randn(1, 16))")
    result = project.measure("--cudagraph-update")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert not list(project.path.glob(".cudagraph/*.json"))


def test_an_interrupt_while_measuring_leaves_the_baseline_untouched(project):
    body = """
calls = []
class Stops(Mlp):
    def forward(self, x):
        calls.append(1)
        if len(calls) > 60:
            raise KeyboardInterrupt
        return super().forward(x)
cudagraph(Stops().eval(), torch.randn(1, 16), min_speedup=0.01)
"""
    project.write(good=GOOD, stopped=body)
    result = project.measure("--cudagraph-update")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert not list(project.path.glob(".cudagraph/*.json"))


def test_kernels_that_are_being_accepted_are_shown(project):
    project.write(good=GOOD)
    project.measure("--cudagraph-update")
    project.write(good=SLOW)
    result = project.measure("--cudagraph-update")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["  * -> * kernels: +400 aten.mul"])
