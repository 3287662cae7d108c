"""The fixture ``perf_monitor``: limits fail the test with evidence, and what was recorded is in the document."""

import importlib
import json

import pytest

TESTS = """
def work(perf_monitor):
    for _ in range(3):
        with perf_monitor.measure("decode", tokens=4, batch_size=4):
            pass

def test_holds(perf_monitor):
    work(perf_monitor)
    perf_monitor.expect("decode", max_failures=0, min_calls=3)

def test_missed(perf_monitor):
    work(perf_monitor)
    perf_monitor.expect("decode", min_graph_hit_ratio=1.0)

def test_card(perf_monitor):
    with perf_monitor() as watch:
        pass
    assert watch.card.lines()
"""


def test_a_missed_limit_fails_at_the_tests_own_line_and_calls_are_in_the_document(project):
    project.pytester.makepyfile(TESTS)
    result = project.measure("--cudagraph-json=run.json")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines([
        ">*perf_monitor.expect(\"decode\", min_graph_hit_ratio=1.0)",
        "E *pytest_cudagraph.ExpectationMissed: decode: no runner was called; this test asks for *100 % by graphs",
        "E *decode: 3 calls in *",
    ])  # fmt: skip
    assert "pytest_cudagraph/" not in result.stdout.str()
    calls = json.loads((project.path / "run.json").read_text(encoding="utf-8"))["calls"]
    file = next(project.path.glob("test_*.py")).name
    assert [(each["nodeid"], each["name"], each["calls"], each["tokens"]) for each in calls] == [
        (f"{file}::test_holds", "decode", 3, 12),
        (f"{file}::test_missed", "decode", 3, 12),
    ]


AGAINST = """
import torch
from models import *

class Clock:
    resolution_ns, now = 1, 0
    def now_ns(self):
        return self.now

def test_serving(perf_monitor, cudagraph):
    report = cudagraph(Mlp().eval(), torch.randn(1, 16), batch_sizes=[1], min_speedup=0.01)
    clock = Clock()
    perf_monitor.calls.now_ns = clock.now_ns
    for _ in range(12):
        with perf_monitor.measure("decode", tokens=2):
            clock.now += CALL_NS
    perf_monitor.expect("decode", baseline=report)
"""


@pytest.fixture
def other_work(monkeypatch):
    """A list whose one number is the other work that each measurement sees."""
    found = [0.0]
    # The package has a function of the module's name.
    module = importlib.import_module("pytest_cudagraph.baseline.history")
    monkeypatch.setattr(module, "_beyond_rest_log", lambda latency: found[0])
    return found


def test_calls_are_compared_with_the_entry_of_the_model_and_saved_in_it(project, other_work):
    def run(call_ns, *options):
        project.pytester.makepyfile(test_user=AGAINST.replace("CALL_NS", str(call_ns)))
        return project.measure(*options)

    run(50_000_000, "--cudagraph-update").assert_outcomes(passed=1)
    run(51_000_000, "--cudagraph-update=new").assert_outcomes(passed=1)
    (session,) = json.loads(project.baseline.read_text())["benchmarks"][-1]["extra_info"]["cudagraph"]["sessions"]
    assert session["figures"] == {
        "decode: time per call": {"median": 0.05, "q1": 0.05},
        "decode: time per token": {"median": 0.025, "q1": 0.025},
    }
    result = run(400_000_000, "--cudagraph-max-slowdown=1")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([
        ">*perf_monitor.expect(\"decode\", baseline=report)",
        "E *SlowerThanBaseline: batch 1: decode: time per call is * slower than the baseline *50.0 -> 400.0 ms*",
    ])  # fmt: skip
    assert "pytest_cudagraph/" not in result.stdout.str()

    other_work[0] = 0.1
    result = run(400_000_000, "--cudagraph-max-slowdown=1")
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(["*InconclusiveWarning: batch 1: decode: time per call is * slower than *"])
    run(400_000_000, "--cudagraph-max-slowdown=1", "--cudagraph-strict").assert_outcomes(failed=1)


def test_the_calls_of_compiled_code_are_compared_under_a_gate_on_its_gain(project, packaged_as_exported):
    """The mode is an argument of the call. The marker alone would ask for a gain over no compiled code."""
    test = AGAINST.replace("CALL_NS", "50_000_000").replace("batch_sizes=[1]", "compile='aot', batch_sizes=[1]")
    test = test.replace("def test_serving", "@pytest.mark.graph_speedup(min_over_compiled=0.01)\ndef test_serving")
    project.pytester.makepyfile(test_user=f"import pytest\n{test}")
    project.measure().assert_outcomes(passed=1)


MISTAKEN = """
import torch
from models import *

def report_of(cudagraph):
    return cudagraph(Mlp().eval(), torch.randn(1, 16), min_speedup=0.01)

def test_no_report(perf_monitor):
    with perf_monitor.measure("decode"): pass
    perf_monitor.expect("decode", baseline="calls.json")

def test_no_size(perf_monitor, cudagraph):
    for _ in range(10):
        with perf_monitor.measure("decode"): pass
    perf_monitor.expect("decode", baseline=report_of(cudagraph))

def test_few_calls(perf_monitor, cudagraph):
    with perf_monitor.measure("decode"): pass
    perf_monitor.expect("decode", baseline=report_of(cudagraph), batch_size=2)
"""


def test_a_baseline_that_cannot_be_compared_is_one_sentence(project):
    project.pytester.makepyfile(MISTAKEN)
    result = project.measure()
    result.assert_outcomes(failed=3)
    result.stdout.fnmatch_lines([
        "E *InputError: baseline takes the report that cudagraph returned; found 'calls.json'",
        "E *InputError: batch_size takes one of the sizes of the report, [[]1, 2[]]; found None",
        "E *ExpectationMissed: decode: a baseline keeps at least 10 calls; found 1",
    ])  # fmt: skip
    project.run("-k", "few_calls").assert_outcomes(passed=1, deselected=2)
