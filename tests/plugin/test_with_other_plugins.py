"""The plugin is a good citizen: it works with other plugins, without them, and under strict options."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pytest_cudagraph.cli import main

GOOD = "cudagraph(Mlp().eval(), torch.randn(1, 16), min_speedup=0.01)"


@pytest.mark.parametrize(
    "options",
    [
        ["--strict-markers"],
        pytest.param(["-W", "error"], marks=pytest.mark.contract),
        pytest.param(["-p", "no:terminal"], marks=pytest.mark.contract),
        pytest.param(["-p", "no:benchmark"], marks=pytest.mark.contract),
        ["-p", "no:cacheprovider"],
        ["-s"],
        ["-q"],
    ],
    ids=" ".join,
)
def test_a_measured_run_passes_with(project, options):
    project.pytester.makepyfile(
        f"""
        import pytest, torch
        from models import *

        @pytest.mark.graph_speedup(batch_sizes=[1], time_budget=1)
        def test_good(cudagraph):
            {GOOD}
        """
    )
    assert project.measure(*options).ret == pytest.ExitCode.OK


def test_a_missed_gate_fails_without_a_terminal(project):
    project.write(slow="cudagraph(SlowUnderCapture().eval(), torch.randn(1, 16))")
    assert project.measure("-p", "no:terminal").ret == pytest.ExitCode.TESTS_FAILED


@pytest.mark.contract
def test_collecting_imports_no_torch_and_so_opens_no_device(project):
    project.pytester.makepyfile("def test_good(cudagraph): pass")
    project.pytester.makeconftest(
        """
        def pytest_unconfigure():
            import sys
            assert "torch" not in sys.modules
        """
    )
    result = project.run_alone("--cudagraph", "--cudagraph-device=cpu", "--collect-only", "-q")
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["*::test_good"])


def test_only_deselects_the_others(project):
    project.write(good=GOOD)
    project.pytester.makepyfile(test_other="def test_other(): pass")
    project.measure("--cudagraph-only").assert_outcomes(passed=1, deselected=1)


def test_nothing_is_said_when_no_test_used_the_plugin(project):
    project.pytester.makepyfile("def test_plain(): pass")
    result = project.measure("--cudagraph-update")
    result.assert_outcomes(passed=1)
    assert "cudagraph" not in "".join(line for line in result.outlines if not line.startswith(("plugins", "rootdir")))


@pytest.mark.contract
def test_xdist_workers_check_and_do_not_judge(project):
    project.write(good=GOOD, other=GOOD, wrong="cudagraph(WrongUnderCapture().eval(), torch.randn(1, 16))")
    project.pytester.makepyfile(test_calls="def test_calls(perf_monitor): perf_monitor.watch('step')(int)()")
    result = project.measure("-n", "2", "--cudagraph-update", "--cudagraph-json=run.json")
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["*4 not judged*", "*2 xdist workers share this machine*"])
    assert not list(project.path.glob(".cudagraph/*.json"))
    found = json.loads((project.path / "run.json").read_text(encoding="utf-8"))
    assert (len(found["tests"]), [each["name"] for each in found["calls"]]) == (3, ["step"])


TORCH_IN_THE_CONTROLLER = """
import sys

def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        print("the controller has torch:", "torch" in sys.modules)
"""


DIES = "import os; os._exit(3)"

BROKEN = f"""
import pytest, torch
from models import *

@pytest.fixture
def broken():
    yield
    assert False

def test_broken(broken, cudagraph):
    {GOOD}
"""


@pytest.mark.contract
def test_a_lone_xdist_worker_is_judged_and_what_passed_is_recorded_also_if_it_died(project):
    project.write(first=GOOD, dies=DIES, last=GOOD)
    project.pytester.makepyfile(test_teardown=BROKEN)
    options = ("--cudagraph-update", "--cudagraph-json=run.json", "--benchmark-json=benchmarks.json")
    result = project.measure("-n", "1", *options)
    result.assert_outcomes(passed=3, failed=1, errors=1)
    result.stdout.fnmatch_lines(["*6 passed, 4 new*", "*wrote 4 entries to *"])
    # Under xdist pytest-benchmark is disabled. Its oldest release makes the file at the start.
    assert not list(filter(Path.read_text, project.path.glob("benchmarks.json")))
    tests = json.loads((project.path / "run.json").read_text(encoding="utf-8"))["tests"]
    assert {test["name"] for test in tests} >= {"test_user.py::test_first", "test_user.py::test_last"}
    recorded = json.loads(project.baseline.read_text(encoding="utf-8"))["benchmarks"]
    assert not [each["fullname"] for each in recorded if "broken" in each["fullname"]]


def test_a_rehearsal_judges_correctness_and_not_speed(project):
    project.write(
        slow="cudagraph(SlowUnderCapture().eval(), torch.randn(1, 16))",
        wrong="cudagraph(WrongUnderCapture().eval(), torch.randn(1, 16))",
    )
    result = project.run("--cudagraph", "--cudagraph-batch-sizes=1", "--cudagraph-update")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*rehearsal: speed is not judged*", "E*ReplayMismatch: *", "*1 wrong, 1 not judged*"])
    assert not list(project.path.glob(".cudagraph/*.json"))


def test_an_inconclusive_test_passes_with_a_warning_and_fails_under_strict(project):
    project.write(short="cudagraph(Mlp().eval(), torch.randn(1, 16), batch_sizes=[1], min_speedup=0.01)")
    options = ("--cudagraph-time-budget=0.001",)
    lenient = project.measure(*options)
    lenient.assert_outcomes(passed=1, warnings=1)
    lenient.stdout.fnmatch_lines(["*InconclusiveWarning: batch 1: *", "*1 inconclusive*"])
    strict = project.measure(*options, "--cudagraph-strict")
    strict.assert_outcomes(failed=1)
    strict.stdout.fnmatch_lines(["E*NotProven: batch 1: *"])


def test_the_json_document_holds_failing_tests_too(project):
    project.write(good=GOOD, wrong="cudagraph(WrongUnderCapture().eval(), torch.randn(1, 16))")
    project.measure("--cudagraph-json=deep/run.json")
    document = json.loads((project.path / "deep" / "run.json").read_text(encoding="utf-8"))
    verdicts = {test["nodeid"].partition("::")[2]: test["verdict"] for test in document["tests"]}
    assert document["schema"] == 1
    assert document["device"]["kind"] == "cpu"
    assert verdicts == {"test_good": "passed", "test_wrong": "wrong"}
    assert all(
        batch["replay"] is None for test in document["tests"] if test["verdict"] == "wrong" for batch in test["batches"]
    )


def test_the_page_of_a_run_is_the_page_of_its_document(project, capsys):
    project.write(good=GOOD, wrong="cudagraph(WrongUnderCapture().eval(), torch.randn(1, 16))")
    result = project.measure("--cudagraph-json=run.json", "--cudagraph-html=deep/run.html")
    result.stdout.fnmatch_lines(["wrote the page deep/run.html"])
    page = (project.path / "deep" / "run.html").read_text(encoding="utf-8")
    assert "<title>CUDA graphs: 2 wrong, 2 passed</title>" in page

    assert main(["report", "run.json", "--html", "again.html"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "wrote again.html"
    assert (project.path / "again.html").read_text(encoding="utf-8") == page


def test_junit_carries_the_figures(project):
    project.write(good=GOOD)
    project.measure("--junit-xml=junit.xml")
    text = (project.path / "junit.xml").read_text(encoding="utf-8")
    assert 'name="cudagraph.verdict" value="passed"' in text
    assert 'name="cudagraph.batch_1.speedup"' in text


def test_the_summary_shows_every_batch_size(project, golden):
    from tests.plugin.conftest import masked

    project.write(good=GOOD)
    lines = project.measure("--cudagraph-batch-sizes=1,2,4").outlines
    first = next(at for at, line in enumerate(lines) if " cudagraph " in line and set(line) <= set("= cudagraph"))
    body = [" ".join(line.split()) for line in lines[first + 1 : -1]]
    golden("plugin/summary.txt", masked("\n".join(body)))


@pytest.mark.parametrize(
    "path", ["folder", "test_user.py/run.json", "x" * 300 + ".json"], ids=["folder", "file", "long"]
)
@pytest.mark.parametrize("flag", ["--cudagraph-json", "--cudagraph-html"])
def test_a_document_that_cannot_be_written_is_a_problem_of_the_run(project, path, flag):
    project.write(good=GOOD)
    (project.path / "folder").mkdir()
    result = project.measure(f"{flag}={path}")
    result.assert_outcomes(passed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([f"{flag}: {path} could not be written: *; nothing was changed"])
    assert "Traceback" not in result.stdout.str() + result.stderr.str()
    assert not list(project.path.rglob("*.tmp"))


def test_a_document_that_was_asked_for_is_of_this_run_also_where_no_test_used_the_plugin(project):
    project.pytester.makepyfile("def test_plain(): pass")
    (project.path / "run.json").write_text("of an earlier run", encoding="utf-8")
    result = project.measure("--cudagraph-json=run.json")
    assert json.loads((project.path / "run.json").read_text(encoding="utf-8"))["tests"] == []
    assert "= cudagraph =" not in result.stdout.str()


def test_a_test_that_leaves_its_folder_does_not_take_the_document_along(project):
    project.write(moves=f"import os\nos.mkdir('away'); os.chdir('away')\n{GOOD}")
    project.measure("--cudagraph-json=run.json").assert_outcomes(passed=1)
    assert (project.path / "run.json").exists()


RETRIES = """
import pytest


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    # As pytest-retry does it: a second attempt within the report of the first, whose report then changes.
    report = yield
    if call.when == "call" and report.failed:
        hook = item.ihook
        other = pytest.Class.from_parent(item.session, name="Other")
        pytest.CallInfo.from_call(lambda: hook.pytest_runtest_teardown(item=item, nextitem=other), when="teardown")
        report.outcome = "retried"
        hook.pytest_runtest_logreport(report=report)
        item._initrequest()
        pytest.CallInfo.from_call(lambda: hook.pytest_runtest_setup(item=item), when="setup")
        call = pytest.CallInfo.from_call(lambda: hook.pytest_runtest_call(item=item), when="call")
        second = pytest.TestReport.from_item_and_call(item, call)
        report.outcome, report.longrepr = second.outcome, second.longrepr
    return report
"""

RETRIED = """
import torch

attempts = []

def test_flaky(cudagraph):
    attempts.append(1)
    cudagraph(torch.nn.ReLU(), torch.randn(1, 4), min_speedup=0.01 if attempts[1:] else 1000)

def test_fails_twice(cudagraph):
    cudagraph(torch.nn.ReLU(), torch.randn(1, 4), min_speedup=1000)
"""


@pytest.mark.parametrize("options", [(), ("-p", "no:benchmark", "-n", "1")], ids=["alone", "under xdist"])
def test_a_second_attempt_within_the_report_of_the_first_is_the_one_that_counts(project, options):
    project.pytester.makeconftest(RETRIES)
    project.pytester.makepyfile(test_user=RETRIED)
    result = project.measure("--cudagraph-update", "--cudagraph-json=run.json", "--junitxml=junit.xml", *options)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    tests = json.loads((project.path / "run.json").read_text(encoding="utf-8"))["tests"]
    assert [(each["name"], each["verdict"]) for each in tests] == [
        ("test_user.py::test_flaky", "passed"), ("test_user.py::test_fails_twice", "failed"),
    ]  # fmt: skip
    assert {
        each["extra_info"]["cudagraph"]["name"] for each in json.loads(project.baseline.read_text())["benchmarks"]
    } == {"test_user.py::test_flaky"}
    assert (project.path / "junit.xml").read_text(encoding="utf-8").count('name="cudagraph.verdict"') == 2


@pytest.mark.parametrize("options", [("--cudagraph",), ()], ids=["measured", "without the flag"])
def test_without_torch_the_plugin_says_so_in_one_sentence(project, options):
    project.pytester.makeconftest('import sys\nsys.modules["torch"] = None')
    project.pytester.makepyfile(test_user="def test_plain(cudagraph): cudagraph(lambda x: x, 3)")
    result = project.run_alone(*options)
    words = (
        "pytest-cudagraph needs PyTorch, which * cannot import (*): install torch there, or run pytest with -p no:cud*"
    )
    if options:
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines([f"ERROR: {words}"])
    else:
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines([f"E*DeviceUnavailable: {words}"])
    assert "INTERNALERROR" not in result.stdout.str() + result.stderr.str()
    assert "pytest_cudagraph/" not in result.stdout.str()


INTERRUPTS = """
import os, pytest
from pathlib import Path

real, calls = os.fsync, []

def interrupt(descriptor):
    calls.append(descriptor)
    if len(calls) == {at}:
        raise KeyboardInterrupt
    real(descriptor)

patch = pytest.MonkeyPatch()

def pytest_runtest_teardown():
    patch.setattr(os, "fsync", interrupt)

pytest_unconfigure = patch.undo
"""


@pytest.mark.parametrize("at", [1, 2], ids=["baseline", "document"])
def test_ctrl_c_while_the_results_are_written_leaves_each_file_whole_or_as_it_was(project, at):
    project.write(plain=GOOD)
    project.measure("--cudagraph-update=all", "--cudagraph-json=run.json").assert_outcomes(passed=1)
    before = {path: path.read_bytes() for path in (project.baseline, project.path / "run.json")}
    project.pytester.makeconftest(INTERRUPTS.format(at=at))
    result = project.measure("--cudagraph-update=all", "--cudagraph-json=run.json", "--junitxml=junit.xml")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(
        ["interrupted while the results were written: each file is written whole or unchanged; run again"]
    )
    for path, content in before.items():
        json.loads(path.read_text(encoding="utf-8"))
        assert path.read_bytes() == content or at == 2
    assert (project.path / "run.json").read_bytes() == before[project.path / "run.json"]
    assert (project.path / "junit.xml").is_file()
    assert not list(project.path.rglob(".*.tmp"))


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_no_run_waits_for_a_pipe_or_a_device_in_the_baseline_folder(project, make):
    project.write(plain=GOOD)
    project.measure("--cudagraph-update").assert_outcomes(passed=1)
    make(project.baseline.with_name("other.json"))
    project.measure().assert_outcomes(passed=1)
    own = next(path for path in project.path.glob(".cudagraph/*.json") if path.name != "other.json")
    own.unlink()
    make(own)
    result = project.measure()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {own}: cannot be read (only a regular file is read)"])
