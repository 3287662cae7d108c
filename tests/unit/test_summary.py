"""Which entries are stale at the end of a run: only those that no test of the project can measure."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.facts import CPU, report, saved

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
    whole=True,
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


NODE_IDS = {name for name in NAMES if "::" in name}


@pytest.mark.parametrize("not_passed", ["tests/test_b.py::test_new", "tests/test_a.py::test_new"])
def test_a_test_that_told_nothing_may_have_any_name_of_its_own(stale, not_passed):
    assert stale(not_passed=frozenset({not_passed})) == NODE_IDS


def test_a_test_that_told_nothing_may_have_the_node_ids_that_its_file_names(stale, tmp_path):
    (tmp_path / "tests" / "test_a.py").write_text("name='tests/test_gone.py::test_old'", encoding="utf-8")
    not_passed = frozenset({"tests/test_a.py::test_new"})
    assert stale(not_passed=not_passed) == NODE_IDS - {"tests/test_gone.py::test_old"}


def test_a_test_that_told_nothing_has_its_own_node_id(stale):
    not_passed = frozenset({"tests/test_a.py::test_old"})
    assert stale(not_passed=not_passed) == NODE_IDS - {"tests/test_a.py::test_old"}


def test_a_folder_with_all_that_is_saved_tells_of_node_ids(stale):
    names = ("tests/test_a.py::test_old", "tests/test_gone.py::test_old", "mine")
    assert stale(names, paths=("tests",), whole=False) == set(names) - {"mine"}


@pytest.mark.parametrize("paths", [("tests/test_a.py",), ("tests",)])
def test_a_part_of_what_is_saved_tells_of_no_name(stale, paths):
    assert stale(paths=paths, whole=False) == set()


def test_a_file_that_nobody_looked_into_may_have_any_name(stale, tmp_path):
    (tmp_path / "tests" / "test_b.py").touch()
    assert stale((*NAMES, "tests/test_b.py::test_there")) == set()


def test_a_run_of_the_testpaths_tells_of_the_tests_in_them(stale):
    names = (*NAMES, "benchmarks/test_gone.py::test_old")
    assert stale(names, paths=("tests",)) == {"tests/test_a.py::test_old", "tests/test_gone.py::test_old"}


def test_a_run_that_was_cut_short_tells_nothing(stale):
    assert stale(complete=False) == set()
