"""The lines that the plugin prints to pytest's terminal. Only this module does, and it makes each of them printable."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from typing import Any

import pytest

from pytest_cudagraph.foreign import printable


def say(config: pytest.Config, line: str) -> None:
    """A line that stays."""
    reporter = _reporter(config)
    if reporter is not None:
        reporter.write_line(printable(f"cudagraph: {line}"))


def show(config: pytest.Config, line: str) -> None:
    """A line of progress over the last one, as long as the terminal is wide; nothing on a pipe. Empty: clear it."""
    reporter = _reporter(config)
    if reporter is not None and reporter.isatty:
        # A line that wraps could not be written over.
        reporter.rewrite(printable(line)[: shutil.get_terminal_size().columns - 1], erase=True)


def write_section(
    reporter: pytest.TerminalReporter, lines: Iterable[str], problems: Iterable[str], commands: Iterable[str]
) -> None:
    """The section of the summary. ``commands`` are for GitHub's runner, which reads them only as they are."""
    reporter.section("cudagraph")
    for line in lines:
        reporter.line(printable(line))
    for problem in problems:
        for line in problem.splitlines():
            reporter.line(printable(line), red=True)
    for command in commands:
        reporter.line(command)


def _reporter(config: pytest.Config) -> Any:
    return config.pluginmanager.get_plugin("terminalreporter")
