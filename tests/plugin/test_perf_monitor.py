"""The fixture ``perf_monitor``: limits fail the test with evidence, and what was recorded is in the document."""

import json

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
