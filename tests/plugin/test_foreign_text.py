"""Names, error texts and files of others: no character in them loses a result or reaches the terminal as a command."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

NAMED = 'cudagraph(Mlp().eval(), torch.randn(1, 16), min_speedup=0.01, name="{name}")'
RAISES = 'def model(x): raise ValueError("\\ud800 and \\x1b[2J")\ncudagraph(model, torch.randn(1, 16))'
SLOW = 'cudagraph(Mlp().eval(), torch.randn(1, 16), min_speedup=1000, name="\\ud800\\x1b[2J")'
UNDER_XDIST = ("-p", "no:benchmark", "-n", "1")
CLEAR = "\x1b[2J"


def shown(result):
    return result.stdout.str() + result.stderr.str()


@pytest.mark.parametrize(
    "options", [(), pytest.param(UNDER_XDIST, marks=pytest.mark.contract)], ids=["alone", "under xdist"]
)
def test_a_lone_surrogate_in_a_name_or_an_error_loses_no_result(project, options):
    project.write(named=NAMED.format(name="\\ud800\\x1b[2J"), slow=SLOW.replace("\\ud800", "\\udc80"))
    if not options:
        # Pytest's own report of such an error does not pass between processes.
        project.write("test_raises", raises=RAISES)
    result = project.measure("--cudagraph-json=run.json", "--junitxml=junit.xml", "--cudagraph-update", *options)

    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "INTERNALERROR" not in shown(result)
    tests = json.loads((project.path / "run.json").read_text(encoding="utf-8"))["tests"]
    assert {test["verdict"] for test in tests} == {"passed", "failed", *(() if options else ("not-captured",))}
    assert "\ud800\x1b[2J" in [test["name"] for test in tests]
    properties = ElementTree.parse(project.path / "junit.xml").iterfind(".//property")
    assert "cudagraph.??[2J.batch_1.speedup" in [each.get("name") for each in properties]
    assert "SpeedupTooLow" in shown(result)


def test_an_entry_of_such_a_name_is_found_again(project):
    project.write(named=NAMED.format(name="\\ud800"))
    project.measure("--cudagraph-update").assert_outcomes(passed=1)
    result = project.measure("--cudagraph-strict")
    result.assert_outcomes(passed=1)
    assert "stale" not in shown(result)


@pytest.mark.parametrize("name", ["x" * 300, "x" * 300 + "::y", "é" * 5000])
def test_a_name_longer_than_a_file_name_stops_no_later_run(project, name):
    project.write(named=NAMED.format(name=name))
    project.measure("--cudagraph-update").assert_outcomes(passed=1)
    for options in (("--cudagraph-strict",), ("--cudagraph-update", "--cudagraph-suggest")):
        result = project.measure(*options)
        result.assert_outcomes(passed=1)
        assert "INTERNALERROR" not in shown(result)


def test_an_escape_in_a_name_reaches_no_terminal(project):
    project.write(
        named=NAMED.format(name="one\\x1b[2J"),
        slow=SLOW.replace("\\ud800", "two"),
        mistake="cudagraph(Mlp(), 3, name='\\x1b[2J')",
    )
    result = project.measure("--cudagraph-update", "--cudagraph-suggest")
    assert "suggest: one?[2J: min_speedup=" in shown(result)
    project.write(other=NAMED.format(name="other"))
    strict = project.measure("--cudagraph-strict", "--cudagraph-update")
    assert "strict: 2 stale" in shown(strict)
    assert CLEAR not in shown(result) + shown(strict)


def test_an_escape_in_the_file_of_another_device_reaches_no_terminal(project):
    project.write(named=NAMED.format(name="one"))
    project.measure("--cudagraph-update").assert_outcomes(passed=1)
    document = json.loads(project.baseline.read_text(encoding="utf-8"))
    for record in document["benchmarks"]:
        record["extra_info"]["cudagraph"].get("device", {})["name"] = "TPU\x1b[2J"
    project.baseline.rename(project.baseline.with_name("tpu.json")).write_text(json.dumps(document), encoding="utf-8")
    result = project.measure("--cudagraph-strict")

    assert "the baseline is of TPU?[2J" in shown(result)
    assert CLEAR not in shown(result)


def test_an_escape_in_a_mark_reaches_no_terminal(project):
    project.pytester.makepyfile(
        test_user="""
        import pytest

        class Loud:
            def __repr__(self):
                return "\\x1b[2J"

        @pytest.mark.graph_speedup(min=Loud())
        def test_marked(cudagraph):
            pass
        """
    )
    result = project.measure()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["test_user.py::test_marked: *min takes a number above 0; found [?][[]2J"])
    assert CLEAR not in shown(result)
