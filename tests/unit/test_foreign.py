"""Text from outside reaches a terminal and a file without its control characters."""

from __future__ import annotations

import pytest

from pytest_cudagraph import errors
from pytest_cudagraph.foreign import first_line_of, printable, printable_lines


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("tests/é.py::显卡[a-b]", "tests/é.py::显卡[a-b]"),
        ("\x1b[2J\x07gone", "?[2J?gone"),
        ("two\nlines\r", "two?lines?"),
        ("\u202eright to left", "?right to left"),
        ("lone \ud800", "lone ?"),
    ],
)
def test_what_a_terminal_would_obey_is_a_question_mark(text, shown):
    assert printable(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("::stop-commands::x", ": :stop-commands::x"),
        ("  ::add-mask::x", "  : :add-mask::x"),
        ("a ##[error]x ##[x", "a ## [error]x ## [x"),
        ("test_a.py::test_b", "test_a.py::test_b"),
        ("a ## [b", "a ## [b"),
    ],
)
def test_no_text_is_a_command_to_the_runner_of_github(text, shown):
    assert printable(text) == shown
    assert printable_lines(f"one\n{text}") == f"one\n{shown}"


def test_lines_stay_lines():
    assert printable_lines("one\n\ttwo\x1b\n") == "one\n        two?\n"


@pytest.mark.parametrize("kind", [errors.InputError, errors.SpeedupTooLow, errors.CaptureRefusal])
def test_every_error_of_this_package_is_printable(kind):
    assert str(kind("\x1b]0;title\x07 \ud800\nsecond line")) == "?]0;title? ?\nsecond line"


def test_the_first_line_is_the_first_that_says_something():
    assert first_line_of("\n  one  \ntwo") == "one"
    assert first_line_of(" \n") == ""
