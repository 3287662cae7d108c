"""The end of a run: files are written, the summary is made and shown. What is raised on the way loses nothing else."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_cudagraph.errors import CudagraphError, first_line
from pytest_cudagraph.session import ci, terminal, workers
from pytest_cudagraph.session.state_keys import (
    ADDITIONS,
    COLLECTED,
    DESELECTED,
    DEVICE_CONTEXTS,
    OURS,
    OUTCOMES,
    PASSED,
    RUN_SUMMARY,
    SETTINGS,
    WORKLOADS,
)
from pytest_cudagraph.settings import other_plugins

if TYPE_CHECKING:
    from pytest_cudagraph.summary import CollectedTests, RunSummary
    from pytest_cudagraph.values import Addition, GraphReport, ReportColumn, Table

_INTERRUPTED = "interrupted while the results were written: each file is written whole or unchanged; run again"


def end(session: pytest.Session, exitstatus: int) -> None:
    """Write the files and make the summary. An xdist worker sends its results to the controller instead."""
    config = session.config
    if hasattr(config, "workerinput"):
        workers.send(config)
    elif _has_summary(config):
        summary = _summary(session, exitstatus)
        config.stash[RUN_SUMMARY] = summary
        if summary.failed and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if not config.pluginmanager.has_plugin("terminalreporter"):
            sys.stderr.write("".join(f"{line}\n" for line in summary.problems))


def _summary(session: pytest.Session, exitstatus: int) -> RunSummary:
    from pytest_cudagraph.summary import RunSummary, end_run

    config, stash = session.config, session.config.stash
    try:
        outcomes: list[GraphReport] = stash[OUTCOMES]
        additions: list[Addition] = stash[ADDITIONS]
        columns, tables, problems = _ask_other_plugins(config, outcomes)
        summary = end_run(
            outcomes, _collected(session, exitstatus), stash[SETTINGS],
            {opened.device: opened.saved for opened in stash[DEVICE_CONTEXTS].values()},
            additions=additions, workloads=list(stash[WORKLOADS].values()),
            columns=columns, tables=tables, problems=problems,
        )  # fmt: skip
        return ci.write_step_summary(outcomes, summary, stash[SETTINGS])
    except KeyboardInterrupt:
        # Other plugins still write their files, such as JUnit's.
        session.exitstatus = pytest.ExitCode.INTERRUPTED
        return RunSummary(problems=(_INTERRUPTED,), failed=True)
    except other_plugins.RAISED as error:
        # Text and values of others can hold anything. The failures, JUnit's file and the other plugins are not lost.
        text = f"the summary of this run could not be made: {first_line(error)}; what is missing was not written"
        return RunSummary(problems=(text,), failed=True)


def _ask_other_plugins(
    config: pytest.Config, reports: Sequence[GraphReport]
) -> tuple[tuple[ReportColumn, ...], tuple[Table, ...], list[str]]:
    """Their columns and tables, and what their hooks raised."""
    problems = other_plugins.hand_over(config, reports)
    try:
        return other_plugins.columns(config), other_plugins.tables(config, reports), problems
    except CudagraphError as error:
        return (), (), [*problems, str(error)]


def _has_summary(config: pytest.Config) -> bool:
    """A document is written even if no test used the plugin: the file of an earlier run would be misleading."""
    stash, settings = config.stash, config.stash[SETTINGS]
    wanted = bool(stash[OUTCOMES]) or bool(stash[DEVICE_CONTEXTS]) or bool(settings.json or settings.html)
    return settings.enabled and not config.option.collectonly and wanted


def _collected(session: pytest.Session, exitstatus: int) -> CollectedTests:
    from pytest_cudagraph.summary import CollectedTests

    config, stash = session.config, session.config.stash
    paths = tuple(_from_root(config, argument) for argument in config.args)
    finished = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    is_whole = not stash[DESELECTED] and ("." in paths or _testpaths(config) <= set(paths))
    was_cut_short = bool(session.shouldstop or session.shouldfail)
    seen, ours, passed = stash[COLLECTED], stash[OURS], stash[PASSED]
    # Without any collected test, every xdist worker died.
    have_passed = bool(seen) and ours <= passed
    return CollectedTests(
        passed=frozenset(passed),
        files=frozenset(nodeid.partition("::")[0] for nodeid in seen),
        finished=finished,
        complete=finished and is_whole and not was_cut_short and have_passed,
        given_sizes=frozenset(stash[SETTINGS].batch_sizes if _asks_for_sizes(config) else ()),
        paths=paths,
        folder=config.invocation_params.dir,
    )


def _asks_for_sizes(config: pytest.Config) -> bool:
    return config.getoption("--cudagraph-batch-sizes") is not None


def _testpaths(config: pytest.Config) -> set[str]:
    """The project's ``testpaths``, relative to the root directory. Without them the root directory itself."""
    root = config.rootpath
    # As pytest expands them. Path.glob refuses some patterns that pytest allows (".", absolute ones).
    paths = [path for pattern in config.getini("testpaths") for path in glob(pattern, root_dir=root, recursive=True)]  # noqa: PTH207
    return {Path(os.path.normpath(path)).as_posix() for path in paths} or {"."}


def _from_root(config: pytest.Config, argument: str) -> str:
    path = Path(os.path.normpath(config.invocation_params.dir / argument))
    return path.relative_to(config.rootpath).as_posix() if path.is_relative_to(config.rootpath) else argument


def show_summary(reporter: pytest.TerminalReporter) -> None:
    """The table, the counts, what was written; nothing when no test used the plugin."""
    summary = reporter.config.stash.get(RUN_SUMMARY, None)
    if summary is not None and (summary.table or summary.lines or summary.problems):
        commands, problems = [], list(summary.problems)
        try:
            commands = ci.annotation_lines(reporter.config, reporter.stats)
        except other_plugins.RAISED as error:
            problems.append(f"no line is annotated: {first_line(error)}")
        terminal.write_section(reporter, (*summary.table, *summary.lines), problems, commands)
