"""The scenario of docs/extending.md: a stranger's, by hooks and the public runner from a conftest alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
_, CONFTEST, TESTS = re.findall(r'^```python title="[^"]*"\n(.*?)^```', PAGE.read_text(encoding="utf-8"), re.M | re.S)


@pytest.fixture
def toy(project):
    project.pytester.makeconftest(CONFTEST)
    project.pytester.makepyfile(test_draws=TESTS)
    return project


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_it_is_gated_and_shown_everywhere_also_from_another_process(toy, options):
    result = toy.measure("--cudagraph-json=run.json", "--cudagraph-html=run.html", "--junitxml=junit.xml", *options)

    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "E *conftest.TooManyDraws: batch 1: 3 draws; this test allows 2",
            "draws * count",
            "*test_two[[]draws] * 2",
            "*test_three[[]draws] * 3",
        ]
    )
    run = json.loads((toy.path / "run.json").read_text())
    assert [test["batches"][0]["scenario"]["result"] for test in run["tests"]] == [{"count": 2}, {"count": 3}]
    page = (toy.path / "run.html").read_text()
    assert "<h2>Draws" in page
    assert "test_draws.py::test_three[draws]" in page
    properties = ElementTree.parse(toy.path / "junit.xml").iter("property")
    drawn = [each.get("value") for each in properties if each.get("name", "").endswith(".batch_1.draws")]
    assert drawn == ["2", "3"]


def test_without_the_flag_it_runs_once_and_nothing_is_judged(toy):
    toy.run().assert_outcomes(passed=2)


def test_its_mark_is_described_and_checked_at_collection(toy):
    assert "@pytest.mark.draws(*, most, device)" in toy.run("--markers").stdout.str()
    toy.pytester.makepyfile(test_draws=TESTS.replace("most=2)\ndef", "most='two')\ndef"))
    result = toy.run()
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*test_two: @pytest.mark.draws: most takes a whole number; found 'two'"])


def test_its_name_is_measured_once_per_test(toy):
    toy.pytester.makepyfile(test_draws="def test_twice(draws):\n" + "    draws(lambda: 1, most=2)\n" * 2)
    toy.measure().stdout.fnmatch_lines(
        ["E *InputError: name 'test_draws.py::test_twice[[]draws]' was measured already*"]
    )
