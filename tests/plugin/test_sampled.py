"""What a process of ``--cudagraph-base`` says of its tests, whether or not they came to measure anything."""

from __future__ import annotations

import json

import pytest

TESTS = """
import pytest


@pytest.fixture
def weights():
    return open("weights.bin").read()


def test_passes(cudagraph):
    pass


def test_fails(cudagraph):
    open("weights.bin").read()


def test_errs(cudagraph, weights):
    pass


def test_asks_for_what_is_not_there(cudagraph, no_such_fixture):
    pass


@pytest.mark.skip(reason="no weights")
def test_is_skipped(cudagraph):
    pass


@pytest.mark.xfail(reason="known")
def test_is_known_to_fail(cudagraph):
    raise ValueError


@pytest.mark.parametrize("size", [1, 2])
def test_of(cudagraph, size):
    pass


class TestGroup:
    def test_within(self, cudagraph):
        pass


def test_of_something_else():
    pass
"""


@pytest.fixture
def sampled(project, pytester):
    """Runs pytest as the comparison does; gives the exit code, and the course that was left."""
    pytester.makepyfile(test_user=TESTS)

    def run(*arguments):
        into = pytester.mkdir("into")
        options = ("--cudagraph", "--cudagraph-device=cpu", "--cudagraph-only", f"--cudagraph-sample={into}")
        result = project.run(*options, *arguments)
        left = into / "course.json"
        return result, json.loads(left.read_text()) if left.exists() else None

    return run


def test_how_each_test_ended_is_told_with_the_first_line_of_its_reason(sampled, pytester):
    pytester.makepyfile(test_later="import pytest\n\npytest.skip('no GPU', allow_module_level=True)\n")
    result, course = sampled("-k", "not within and not 2")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    missing = "[Errno 2] No such file or directory: 'weights.bin'"
    assert course == {
        "is_finished": True,
        "broken": [],
        "ends": {
            "test_later.py": ["skipped", "no GPU"],
            "test_user.py::test_passes": ["passed", ""],
            "test_user.py::test_fails": ["failed", f"FileNotFoundError: {missing}"],
            "test_user.py::test_errs": ["failed in setup", f"FileNotFoundError: {missing}"],
            "test_user.py::test_asks_for_what_is_not_there": ["failed in setup", "fixture 'no_such_fixture' not found"],
            "test_user.py::test_is_skipped": ["skipped", "no weights"],
            "test_user.py::test_is_known_to_fail": ["skipped", "known"],
            "test_user.py::test_of[1]": ["passed", ""],
            "test_user.py::test_of[2]": ["deselected", ""],
            "test_user.py::TestGroup::test_within": ["deselected", ""],
            "test_user.py::test_of_something_else": ["without a fixture of this plugin", ""],
        },
    }


def test_a_file_that_cannot_be_collected_is_told(sampled, pytester):
    pytester.makepyfile(test_broken="import generated\n")
    result, course = sampled()
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert (course["is_finished"], course["broken"]) == (False, ["test_broken.py"])


def test_a_run_that_is_broken_off_did_not_finish(sampled, pytester):
    pytester.makepyfile(test_stop="import pytest\n\ndef test_stops(cudagraph):\n    pytest.exit('enough')\n")
    _, course = sampled()
    assert course["is_finished"] is False
    assert course["ends"]["test_user.py::test_passes"] == ["not run", ""]


@pytest.mark.parametrize(
    ("named", "ran"),
    [
        (["test_user.py::test_passes", "test_user.py::test_gone"], ["test_passes"]),
        (["test_user.py::test_of"], ["test_of[1]", "test_of[2]"]),
        (["test_user.py::test_of[2]", "./test_user.py::TestGroup"], ["test_of[2]", "TestGroup::test_within"]),
        (["test_user.py::TestGroup::test_within"], ["TestGroup::test_within"]),
        (["test_user.py::test_gone"], []),
    ],
)
def test_a_named_test_that_is_not_there_does_not_keep_the_others_from_running(sampled, named, ran):
    result, course = sampled(*named)
    assert result.ret == (pytest.ExitCode.OK if ran else pytest.ExitCode.NO_TESTS_COLLECTED)
    ends = course["ends"].items()
    assert [place.partition("::")[2] for place, (how, _) in ends if how == "passed"] == ran
    assert course["is_finished"] is True


def test_a_process_that_would_share_its_machine_with_workers_is_refused(sampled):
    result, course = sampled("-n", "2")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert course is None
    result.stderr.fnmatch_lines(["*measures in processes of its own, one at a time: run without -n"])
