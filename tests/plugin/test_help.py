"""What pytest itself tells of the plugin: options, marks, fixtures."""

from __future__ import annotations

from pytest_cudagraph.decoding.mark import DECODE
from pytest_cudagraph.settings.registered import FIXTURES, MARK, OPTIONS, WORKLOAD_MARK


def test_help_lists_every_option_with_its_words(project):
    result = project.run("--help")
    assert result.ret == 0
    told = " ".join(result.stdout.str().split())
    for option in OPTIONS:
        assert option.flag in told
        # Once for the flag and once for its ini twin.
        assert told.count(option.help) >= 2, option.flag


def test_marks_and_fixtures_are_described(project):
    markers = project.run("--markers").stdout.str()
    assert all(f"@pytest.mark.{mark}(" in markers for mark in (MARK, DECODE.name, WORKLOAD_MARK))
    fixtures = project.run("--fixtures").stdout.str()
    assert all(f"\n{name} -- " in fixtures for name in FIXTURES | DECODE.fixtures)
