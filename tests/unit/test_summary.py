"""Which entries are stale at the end of a run: only those that no test of the project can measure."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.facts import CPU, batch, report, saved

from pytest_cudagraph.baseline import JsonStore
from pytest_cudagraph.settings.options import Settings
from pytest_cudagraph.settings.registered import OPTIONS
from pytest_cudagraph.summary import CollectedTests, end_run

HERE = "tests/test_a.py::test_here"
WHOLE = CollectedTests(
    passed=frozenset({HERE}),
    files=frozenset({"tests/test_a.py"}),
    finished=True,
    complete=True,
    paths=(".",),
)
NAMES = ("tests/test_a.py::test_old", "tests/test_gone.py::test_old", "mine", "a::b")


@pytest.fixture
def stale(tmp_path):
    """Names that a run with one test calls stale, of those that are saved and it did not cover."""
    settings = Settings(**{option.setting: option.default for option in OPTIONS}, rootdir=tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").touch()

    def told(names=NAMES, **differs):
        entries = [saved(name, device=CPU) for name in (HERE, *names)]
        JsonStore(settings.baseline_folder, CPU).merge(entries, commit_info={})
        lines = end_run([report(HERE, device=CPU)], replace(WHOLE, **differs), settings).lines
        found = (line.removeprefix("stale: ").partition(", batch ")[0] for line in lines if line.startswith("stale: "))
        return set(found)

    return told


def test_what_a_run_of_all_did_not_cover_is_stale(stale):
    assert stale() == set(NAMES)


def test_a_file_that_nobody_looked_into_may_have_any_name(stale, tmp_path):
    (tmp_path / "tests" / "test_b.py").touch()
    assert stale((*NAMES, "tests/test_b.py::test_there")) == set()


def test_a_run_of_the_testpaths_tells_of_the_tests_in_them(stale):
    names = (*NAMES, "benchmarks/test_gone.py::test_old")
    assert stale(names, paths=("tests",)) == {"tests/test_a.py::test_old", "tests/test_gone.py::test_old"}


def test_a_run_that_was_cut_short_tells_nothing(stale):
    assert stale(complete=False) == set()


class Raises:
    """A scenario whose every word is an error, as those of other plugins may be."""

    kind = "raises"
    has_entry = False

    def __init__(self, error):
        self._error = error

    def tables(self, test):
        raise self._error

    def document(self):
        raise self._error

    properties = document


@pytest.fixture
def ended(tmp_path):
    """The summary of a run that writes all its files, and what is in its folder afterwards."""
    options = {option.setting: option.default for option in OPTIONS} | {"json": "run.json", "html": "run.html"}
    settings = Settings(**options | {"update": "changed"}, rootdir=tmp_path)

    def end(*reports, **rest):
        passed = frozenset(each.nodeid for each in reports)
        collected = replace(WHOLE, passed=passed, folder=tmp_path)
        summary = end_run(reports, collected, settings, **rest)
        return summary, {each.name for each in tmp_path.iterdir()}

    return end


ALL = {".cudagraph", "run.json", "run.html"}


def test_all_files_of_a_run_are_written(ended):
    summary, written = ended(report(HERE))
    assert (summary.problems, written) == ((), ALL)


@pytest.mark.parametrize("error", [OverflowError("too large"), pytest.skip.Exception("no"), SystemExit(3)])
def test_a_scenario_that_raises_loses_neither_baseline_nor_counts(ended, error):
    summary, written = ended(report(HERE), report("b.py::test_b", batch(2, scenario=Raises(error), timing=None)))
    assert ".cudagraph" in written
    assert summary.lines[0].startswith("2 passed")
    assert summary.failed
    names = [each.partition(" could not be made: ")[0] for each in summary.problems]
    assert names == ["the tables", "the document", "the table"]
    assert all(type(error).__name__ in each for each in summary.problems)


def test_a_page_that_cannot_be_made_loses_no_document(ended, monkeypatch):
    monkeypatch.setattr("pytest_cudagraph.report.page", lambda run: 10**400 * 1.0)
    summary, written = ended(report(HERE))
    assert written == ALL - {"run.html"}
    (problem,) = summary.problems
    assert problem.startswith("--cudagraph-html: run.html could not be written: int too large")
    assert summary.table


def test_a_baseline_that_cannot_be_judged_loses_no_document(ended, monkeypatch):
    monkeypatch.setattr("pytest_cudagraph.record.counts", lambda *args, **rest: 10**400 * 1.0)
    summary, written = ended(report(HERE))
    assert written == ALL
    assert summary.problems[0].startswith("the baseline could not be made: OverflowError")
    assert summary.table


def test_an_interrupt_is_none_of_these(ended, monkeypatch):
    def interrupt(*args, **rest):
        raise KeyboardInterrupt

    monkeypatch.setattr("pytest_cudagraph.report.table", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ended(report(HERE))
