"""A saved entry is called stale only where the run could have seen its test and did not; strict fails on it."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

GOOD = "cudagraph(Mlp().eval(), torch.randn(1, 16), min_speedup=0.01, batch_sizes=[1])"
UNSIZED = GOOD.replace(", batch_sizes=[1]", "")
CHANGED = {
    "skipped": ("def test_other(cudagraph):", "@pytest.mark.skip\ndef test_other(cudagraph):"),
    "skipped inside": (f"    {GOOD}\n\n# other", f"    pytest.skip('not here')\n    {GOOD}\n\n# other"),
    "not run": ("def test_other(cudagraph):", "@pytest.mark.xfail(run=False)\ndef test_other(cudagraph):"),
    "module skipped": ("# end", "pytest.importorskip('no_such_module')"),
}


@pytest.fixture
def saved(project):
    """Two files with an entry each, and one entry of a name of its own."""
    write(project)
    project.measure("--cudagraph-update").assert_outcomes(passed=3)
    return project


def write(project, old="", new=""):
    source = f"""import pytest, torch
from models import *

def test_other(cudagraph):
    {GOOD}

# other
def test_named(cudagraph):
    {GOOD.replace("batch_sizes", "name='mine', batch_sizes")}

# end
"""
    project.write(good=GOOD)
    project.pytester.makepyfile(test_second=source.replace(old, new) if old else source)


def told_stale(project, *options):
    result = project.measure("--cudagraph-strict", "--cudagraph-max-slowdown=inf", *options)
    assert "Traceback" not in result.stdout.str() + result.stderr.str()
    stale = [line.partition("stale: ")[2] for line in result.outlines if line.startswith("stale: ")]
    assert result.ret == (pytest.ExitCode.TESTS_FAILED if stale else pytest.ExitCode.OK)
    return stale


@pytest.mark.parametrize("change", CHANGED)
def test_a_test_that_is_there_and_did_not_run_leaves_no_stale_entry(saved, change):
    write(saved, *CHANGED[change])
    assert told_stale(saved) == []


@pytest.mark.parametrize(
    "options",
    [["--ignore=test_second.py"], ["--ignore-glob=*second*"], ["-k", "good"], ["test_user.py"], ["deep"]],
    ids=" ".join,
)
def test_a_narrowed_run_calls_nothing_stale(saved, options):
    (saved.path / "deep").mkdir()
    (saved.path / "deep" / "test_deep.py").write_text("def test_plain(): pass\n", encoding="utf-8")
    assert told_stale(saved, *options) == []


def test_files_that_a_conftest_leaves_out_are_not_stale(saved):
    with (saved.path / "conftest.py").open("a", encoding="utf-8") as file:
        file.write("\ncollect_ignore = ['test_second.py']\n")
    assert "test_second.py::test_other, batch 1" not in told_stale(saved)


def test_the_files_that_last_failed_leaves_out_are_not_stale(saved):
    saved.pytester.makepyfile(test_third="def test_broken(): assert False")
    options = ("--cudagraph", "--cudagraph-device=cpu", "--cudagraph-max-slowdown=inf")
    saved.run(*options)
    result = saved.run(*options, "--lf")
    result.assert_outcomes(failed=1)
    assert not [line for line in result.outlines if " stale" in line or line.startswith("stale:")]


def test_a_test_that_failed_before_its_call_leaves_no_stale_entry(saved):
    write(saved, "def test_other(cudagraph):", "def test_other(cudagraph):\n    assert False")
    result = saved.measure("--cudagraph-max-slowdown=inf")
    result.assert_outcomes(failed=1, passed=2)
    assert not [line for line in result.outlines if " stale" in line or line.startswith("stale:")]


def test_a_file_that_is_gone_leaves_stale_entries(saved):
    (saved.path / "test_second.py").unlink()
    assert told_stale(saved) == ["mine, batch 1", "test_second.py::test_other, batch 1"]


def prune_as_told(project):
    (line,) = [each for each in project.measure("--cudagraph-strict").outlines if each.startswith("strict: ")]
    removed = ""
    for part in line.partition("cover them: ")[2].split(" && "):
        command = shlex.split(part)
        assert command[:3] == ["pytest-cudagraph", "baseline", "prune"]
        found = subprocess.run(
            [sys.executable, "-m", "pytest_cudagraph", *command[1:]], capture_output=True, text=True, check=True
        )
        removed += found.stdout
    return removed


def test_what_strict_says_of_stale_entries_can_be_run_as_it_stands(saved):
    (saved.path / "test_second.py").unlink()
    assert prune_as_told(saved).count("removed from ") == 2
    assert told_stale(saved) == []


FEWER = "cudagraph(Mlp().eval(), torch.randn(1, 16), min_speedup=0.01, batch_sizes={})"


def test_what_strict_says_of_stale_batch_sizes_leaves_the_live_ones(project):
    project.write(good=FEWER.format([1, 2, 4, 8]), gone=GOOD)
    project.measure("--cudagraph-update").assert_outcomes(passed=2)
    project.write(good=FEWER.format([1, 4]))
    removed = prune_as_told(project)
    assert [line.rpartition("::")[2] for line in removed.splitlines()] == [
        "test_gone, batch 1",
        "test_good, batch 2",
        "test_good, batch 8",
    ]
    assert told_stale(project) == []


def test_an_update_drops_the_batch_sizes_that_a_passed_test_has_no_more(project):
    project.write(good=FEWER.format([1, 2]), gone=GOOD)
    project.measure("--cudagraph-update").assert_outcomes(passed=2)
    project.write(good=FEWER.format([1]))
    result = project.measure("--cudagraph-update", "--cudagraph-max-slowdown=inf")
    result.stdout.fnmatch_lines(
        ["stale: test_user.py::test_gone, batch 1", "dropped: test_user.py::test_good, batch 2: its test passed *"]
    )
    assert told_stale(project) == ["test_user.py::test_gone, batch 1"]


def test_an_update_of_some_tests_or_sizes_drops_nothing(project):
    project.write(good=FEWER.format([1, 2]), other=GOOD)
    project.measure("--cudagraph-update").assert_outcomes(passed=2)
    project.write(good=FEWER.format([1]), other=GOOD)
    for options in (["-k", "good"], ["test_user.py::test_good"], ["--cudagraph-batch-sizes=1"]):
        result = project.measure("--cudagraph-update", "--cudagraph-max-slowdown=inf", *options)
        assert not [line for line in result.outlines if line.startswith("dropped: ")]


def test_a_run_from_a_subfolder_sees_what_is_stale(saved, monkeypatch):
    (saved.path / "test_second.py").unlink()
    (saved.path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    folder = saved.path / "deep"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert told_stale(saved, "..") == ["mine, batch 1", "test_second.py::test_other, batch 1"]


@pytest.mark.contract
def test_tests_that_a_dead_xdist_worker_never_came_to_leave_no_stale_entries(project):
    project.write(named=GOOD.replace("batch_sizes", "name='mine', batch_sizes"))
    project.measure("--cudagraph-update").assert_outcomes(passed=1)
    project.write(name="test_a_first", lives=GOOD, dies="import os; os._exit(3)")
    result = project.measure("-n", "1", "--max-worker-restart=0")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["1 passed, 1 no baseline yet"])
    assert not [line for line in result.outlines if " stale" in line or line.startswith("stale:")]


MARKED = "import pytest, torch\nfrom models import *\n\n@pytest.mark.graph_speedup({})\ndef test_marked(cudagraph):"


def test_batch_sizes_that_the_command_line_leaves_out_are_not_stale(project):
    project.write(good=UNSIZED)
    project.pytester.makepyfile(test_third=f"{MARKED.format('batch_sizes=[1, 3]')}\n    {UNSIZED}")
    project.measure("--cudagraph-update").assert_outcomes(passed=2)
    assert told_stale(project, "--cudagraph-batch-sizes=2") == []
    project.pytester.makepyfile(test_third=f"{MARKED.format('batch_sizes=[1]')}\n    {UNSIZED}")
    assert told_stale(project, "--cudagraph-batch-sizes=2") == ["test_third.py::test_marked, batch 3"]


@pytest.mark.contract
def test_xdist_tells_the_same_of_skipped_tests_and_of_batch_sizes(saved):
    saved.pytester.makepyfile(test_third=f"{MARKED.format('batch_sizes=[1, 3]')}\n    {UNSIZED}")
    saved.measure("--cudagraph-update").assert_outcomes(passed=4)
    saved.pytester.makepyfile(test_third=f"{MARKED.format('batch_sizes=[1]')}\n    {UNSIZED}")
    options = ("-n", "1", "--cudagraph-batch-sizes=2")
    assert told_stale(saved, *options) == ["test_third.py::test_marked, batch 3"]
    write(saved, *CHANGED["skipped"])
    assert told_stale(saved, *options) == []


def test_batch_sizes_that_the_settings_file_leaves_out_are_stale(project):
    project.write(good=UNSIZED)
    options = ("--cudagraph", "--cudagraph-device=cpu", "--cudagraph-time-budget=2", "--cudagraph-max-slowdown=inf")
    (project.path / "pytest.ini").write_text("[pytest]\ncudagraph_batch_sizes = 1,2\n", encoding="utf-8")
    project.run(*options, "--cudagraph-update").assert_outcomes(passed=1)
    (project.path / "pytest.ini").write_text("[pytest]\ncudagraph_batch_sizes = 2\n", encoding="utf-8")
    project.run(*options).stdout.fnmatch_lines(["stale: test_user.py::test_good, batch 1"])


RENAMED = """import os, pytest, torch
from models import *

def test_new(cudagraph):
    if os.environ.get("SKIP"):
        pytest.skip("not today")
    {call}
"""


def test_a_renamed_test_that_carries_its_old_node_id_is_not_stale(project, monkeypatch):
    """It was saved under its own node id, then moved and renamed: what is saved does not tell where it went."""
    project.write(good=GOOD, old=GOOD)
    project.measure("--cudagraph-update").assert_outcomes(passed=2)
    project.write(good=GOOD)
    call = GOOD.replace("batch_sizes", "name='test_user.py::test_old', batch_sizes")
    project.pytester.makepyfile(test_second=RENAMED.format(call=call))
    assert told_stale(project) == []
    monkeypatch.setenv("SKIP", "1")
    assert told_stale(project) == []


@pytest.mark.parametrize("argument", [[], ["tests"]], ids=["no argument", "the same folder"])
def test_a_run_of_the_testpaths_is_a_run_of_all(project, argument):
    tests = project.path / "tests"
    tests.mkdir()
    (project.path / "pytest.ini").write_text("[pytest]\ntestpaths = test*\npythonpath = .\n", encoding="utf-8")
    write(project)
    for path in project.path.glob("test_*.py"):
        path.rename(tests / path.name)
    project.measure("--cudagraph-update").assert_outcomes(passed=3)
    (tests / "test_second.py").unlink()
    assert told_stale(project, *argument) == ["tests/test_second.py::test_other, batch 1"]
