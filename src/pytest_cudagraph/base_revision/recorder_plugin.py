"""Record, in a process of ``--cudagraph-base``, the collected tests, how each ended, and the imported modules."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from pytest_cudagraph.child_process import end_with_parent
from pytest_cudagraph.foreign import first_line_of
from pytest_cudagraph.settings.registered import uses_plugin


def record_base_run(config: pytest.Config, folder: Path) -> None:
    """Let this process write its record into ``folder``, and end with the process that started it."""
    end_with_parent()
    config.pluginmanager.register(BaseRunRecorder(config, folder), "pytest-cudagraph-base-recorder")


class BaseRunRecorder:
    """A pytest plugin. Without it, a test that could not be measured would look like a test that does not exist."""

    def __init__(self, config: pytest.Config, folder: Path) -> None:
        self._folder = folder
        self._ends: dict[str, tuple[str, str]] = {}
        self._broken: list[str] = []
        self._wanted = [] if config.option.pyargs else _take_names(config)

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self._ends.setdefault(item.nodeid, ("not run", ""))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._broken.append(report.nodeid)
        elif report.skipped:
            self._ends[report.nodeid] = ("skipped", _skip_text(report))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        named = {item: not self._wanted or any(_names(*each, item) for each in self._wanted) for item in items}
        others = [item for item in items if not named[item]]
        if others:
            items[:] = [item for item in items if named[item]]
            config.hook.pytest_deselected(items=others)

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            self._ends[item.nodeid] = ("deselected" if uses_plugin(item) else "without a fixture of this plugin", "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self._ends[report.nodeid] = ("skipped", _skip_text(report))
        elif report.failed:
            how = "failed" if report.when == "call" else f"failed in {report.when}"
            self._ends[report.nodeid] = (how, _error_text(report))
        elif report.passed and report.when == "call":
            self._ends[report.nodeid] = ("passed", "")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        from pytest_cudagraph.base_revision.processes import COURSE, MODULES, module_files

        codes = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
        course = {"is_finished": exitstatus in codes, "broken": self._broken, "ends": self._ends}
        (self._folder / COURSE).write_text(json.dumps(course), encoding="utf-8")
        (self._folder / MODULES).write_text(json.dumps(module_files(sys.modules.values())), encoding="utf-8")


def _take_names(config: pytest.Config) -> list[tuple[Path, str]]:
    """Let pytest collect whole files instead of single tests, and return the tests that were named.

    Pytest runs nothing if a file lacks one of the named tests. Here such a test is one that this revision lacks.
    """
    named = [argument.partition("::") for argument in config.args]
    if not any(colons for _, colons, _ in named):
        return []
    config.args = list(dict.fromkeys(file for file, _, _ in named))
    folder = config.invocation_params.dir
    return [(Path(os.path.normpath(folder / file)), names) for file, _, names in named]


def _names(path: Path, names: str, item: pytest.Item) -> bool:
    """Whether ``path::names`` names a test, by a folder, file, class, function or parameter."""
    found = item.nodeid.partition("::")[2]
    is_below = path == item.path or path in item.path.parents
    return is_below and (not names or found == names or found.startswith((f"{names}::", f"{names}[")))


def _skip_text(report: pytest.TestReport | pytest.CollectReport) -> str:
    if isinstance(report.longrepr, tuple):
        return first_line_of(report.longrepr[2].removeprefix("Skipped: "))
    return first_line_of(getattr(report, "wasxfail", ""))


def _error_text(report: pytest.TestReport) -> str:
    """``FileNotFoundError: ...``, or the first line of an error that pytest formats itself."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return first_line_of(crash.message)
    lines = [line.removeprefix("E").strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
    return first_line_of("\n".join(lines) or report.longreprtext)
