"""One pytest run from configure to summary: settings read, devices opened, results gathered, baseline written."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_cudagraph.foreign import printable_lines
from pytest_cudagraph.session import devices, fleet, foreign_hooks, worker_results
from pytest_cudagraph.session.state_keys import (
    ADDITIONS,
    CALL_LOCK,
    COLLECTED,
    DESELECTED,
    DEVICE_CONTEXTS,
    MISTAKE,
    OURS,
    OUTCOMES,
    OWNERS,
    PASSED,
    REPORTS,
    RUN_SUMMARY,
    SELECTED,
    SETTINGS,
    WORKLOADS,
    marks_of,
)
from pytest_cudagraph.settings.options import read_settings
from pytest_cudagraph.settings.registered import concerns_plugin, uses_plugin

if TYPE_CHECKING:
    from pytest_cudagraph.summary import CollectedTests

_IDLE = tuple(
    f"--cudagraph-{name}" for name in ("base", "update", "suggest", "tune", "json", "html", "strict", "require-gpu")
)

_INTERRUPTED = "interrupted while the results were written: each file is written whole or unchanged; run again"


def begin(config: pytest.Config) -> None:
    """Read the settings and create the state of the session."""
    stash, worker = config.stash, getattr(config, "workerinput", {})
    gpu, why_shared = fleet.gpu_of(worker)
    settings = read_settings(config, workers=worker.get("workercount", 0))
    stash[SETTINGS] = replace(settings, has_own_gpu=bool(gpu), why_shared=why_shared)
    stash[DEVICE_CONTEXTS], stash[OUTCOMES], stash[OWNERS], stash[ADDITIONS] = {}, [], {}, []
    stash[WORKLOADS], stash[CALL_LOCK] = {}, threading.RLock()
    stash[COLLECTED], stash[OURS], stash[PASSED] = set(), set(), set()
    stash[DESELECTED] = _is_narrowed(config)
    folder = stash[SETTINGS].sample
    if folder is not None:
        from pytest_cudagraph.base_revision.recorder_plugin import record_base_run

        record_base_run(config, folder)


def _is_narrowed(config: pytest.Config) -> bool:
    """Whether an option of pytest leaves tests out without calling a hook."""
    flags = ("ignore", "ignore_glob", "lf")
    given = any(config.getoption(flag, None) for flag in flags)
    return given or any("::" in argument for argument in config.args)


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Parse every mark before the first test, so that an error ends the run. Apply ``--cudagraph-only``."""
    with _usage_error_to_controller(config, items):
        for item in filter(concerns_plugin, items):
            marks_of(item)
    if config.stash[SETTINGS].only:
        others = [item for item in items if not uses_plugin(item)]
        items[:] = [item for item in items if uses_plugin(item)]
        if others:
            config.hook.pytest_deselected(items=others)
    config.stash[SELECTED] = True


@contextmanager
def _usage_error_to_controller(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """In an xdist worker, send a usage error to the controller. There nobody would read it, and the process would end.

    The worker then has nothing to run. In any other process the usage error is raised.
    """
    try:
        yield
    except pytest.UsageError as mistake:
        text = printable_lines(str(mistake))
        if not hasattr(config, "workerinput"):
            raise pytest.UsageError(text) from mistake
        config.stash[MISTAKE] = text
        items.clear()


def note_deselected(items: Sequence[pytest.Item]) -> None:
    """Remember that tests with this plugin's fixtures were deselected: their entries are not stale."""
    if any(uses_plugin(item) for item in items):
        items[0].config.stash[DESELECTED] = True


def note_collected(collector: pytest.Collector, report: pytest.CollectReport) -> None:
    """Remember that a file was skipped or not collected: its tests exist and did not run."""
    if not report.passed:
        collector.config.stash[DESELECTED] = True


def open_devices(session: pytest.Session) -> None:
    """Open every device of the selected tests. A missing device is a usage error, not a failed test."""
    config = session.config
    settings = config.stash[SETTINGS]
    # pytest calls this also after a collection error. A second error would hide its text.
    if not settings.enabled or config.option.collectonly or not config.stash.get(SELECTED, False):
        return
    config.stash[COLLECTED].update(item.nodeid for item in session.items)
    ours = [item for item in session.items if uses_plugin(item)]
    config.stash[OURS].update(item.nodeid for item in ours)
    with _usage_error_to_controller(config, session.items):
        devices.open_all(config, ours)


def compare_revisions(session: pytest.Session) -> None:
    """Under ``--cudagraph-base``, measure the selected tests in both revisions before the first of them runs."""
    if session.config.stash[SETTINGS].base is not None:
        from pytest_cudagraph.session import before_tests

        before_tests.compare(session)


def header(config: pytest.Config) -> list[str]:
    """One line for each opened device; nothing when no test uses the plugin.

    Without ``--cudagraph``, one line that names the given options without effect.
    """
    if not config.stash[SETTINGS].enabled:
        idle = [flag for flag in _IDLE if config.getoption(flag) is not None]
        return [f"cudagraph: without --cudagraph nothing is measured or written: {', '.join(idle)}"] if idle else []
    if not config.stash[DEVICE_CONTEXTS]:
        return []
    from pytest_cudagraph.summary import header_line

    lines = [
        header_line(each.device, each.baseline_file, config.stash[SETTINGS], judged=not each.why_not_judged)
        for each in config.stash[DEVICE_CONTEXTS].values()
    ]
    return list(dict.fromkeys(lines))


def begin_test(item: pytest.Item) -> None:
    """Drop the results of an earlier attempt: of a test that runs again the last attempt counts."""
    worker_results.forget(item.config, item.nodeid)
    item.user_properties[:] = [each for each in item.user_properties if not each[0].startswith("cudagraph")]


def note_result(item: pytest.Item, report: pytest.TestReport) -> None:
    """Remember which tests passed in all their phases: only their results may be recorded.

    This is decided at the end, because pytest-retry changes the report of a call after a second attempt.
    """
    worker_results.keep_workload(item, report)
    passed = item.config.stash[PASSED]
    passed.discard(item.nodeid)
    reports = [] if report.when == "setup" else item.stash.get(REPORTS, [])
    item.stash[REPORTS] = [] if report.when == "teardown" else [*reports, report]
    # A subtest has its test's node id, and a test with a failed subtest reports that it passed.
    if report.when == "teardown" and not any(each.failed for each in (*reports, report)):
        calls = [each for each in reports if each.when == "call" and each.passed and not hasattr(each, "wasxfail")]
        passed.update([item.nodeid] if calls else [])


def end(session: pytest.Session, exitstatus: int) -> None:
    """Write the files and make the summary. An xdist worker sends its results to the controller instead."""
    config = session.config
    stash = config.stash
    if hasattr(config, "workerinput"):
        worker_results.send(config)
    elif _has_summary(config):
        from pytest_cudagraph.session import github
        from pytest_cudagraph.summary import RunSummary, end_run

        outcomes, additions = stash[OUTCOMES], stash[ADDITIONS]
        saved = {each.device: each.saved for each in stash[DEVICE_CONTEXTS].values()}
        try:
            columns, problems = foreign_hooks.call_at_end(config, outcomes)
            collected = _collected(session, exitstatus)
            summary = end_run(
                outcomes, collected, stash[SETTINGS], saved, additions=additions,
                workloads=list(stash[WORKLOADS].values()), columns=columns, problems=problems,
            )  # fmt: skip
            summary = github.write_step_summary(outcomes, summary, stash[SETTINGS])
        except KeyboardInterrupt:
            # Other plugins still write their files, such as JUnit's.
            session.exitstatus = pytest.ExitCode.INTERRUPTED
            summary = RunSummary(problems=(_INTERRUPTED,), failed=True)
        stash[RUN_SUMMARY] = summary
        if summary.failed and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if not config.pluginmanager.has_plugin("terminalreporter"):
            sys.stderr.write("".join(f"{line}\n" for line in summary.problems))


def _has_summary(config: pytest.Config) -> bool:
    """A document is written even if no test used the plugin: the file of an earlier run would be misleading."""
    stash, settings = config.stash, config.stash[SETTINGS]
    wanted = bool(stash[OUTCOMES]) or bool(stash[DEVICE_CONTEXTS]) or bool(settings.json or settings.html)
    return settings.enabled and not config.option.collectonly and wanted


def _collected(session: pytest.Session, exitstatus: int) -> CollectedTests:
    from pytest_cudagraph.summary import CollectedTests

    config, stash = session.config, session.config.stash
    finished = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    stopped = bool(session.shouldstop or session.shouldfail)
    seen, ours, passed = stash[COLLECTED], stash[OURS], stash[PASSED]
    paths = tuple(_from_root(config, argument) for argument in config.args)
    return CollectedTests(
        passed=frozenset(passed),
        not_passed=frozenset(ours - passed),
        files=frozenset(nodeid.partition("::")[0] for nodeid in seen),
        finished=finished,
        # Without any collected test, every xdist worker died.
        complete=finished and not stopped and bool(seen) and not stash[DESELECTED],
        given_sizes=frozenset(stash[SETTINGS].batch_sizes if _asks_for_sizes(config) else ()),
        paths=paths,
        whole="." in paths or _testpaths(config) <= set(paths),
        folder=config.invocation_params.dir,
    )


def _asks_for_sizes(config: pytest.Config) -> bool:
    return config.getoption("--cudagraph-batch-sizes") is not None


def _testpaths(config: pytest.Config) -> set[str]:
    """The project's ``testpaths``, relative to the root directory. Without them the root directory itself."""
    root = config.rootpath
    # As pytest expands them. Path.glob refuses some patterns that pytest allows (".", absolute ones).
    found = [path for each in config.getini("testpaths") for path in glob(each, root_dir=root, recursive=True)]  # noqa: PTH207
    return {Path(os.path.normpath(path)).as_posix() for path in found} or {"."}


def _from_root(config: pytest.Config, argument: str) -> str:
    path = Path(os.path.normpath(config.invocation_params.dir / argument))
    return path.relative_to(config.rootpath).as_posix() if path.is_relative_to(config.rootpath) else argument


def summarise(reporter: pytest.TerminalReporter) -> None:
    """The table, the counts, what was written; nothing when no test used the plugin."""
    summary = reporter.config.stash.get(RUN_SUMMARY, None)
    if summary is None or not (summary.table or summary.lines or summary.problems):
        return
    from pytest_cudagraph.session import github

    reporter.section("cudagraph")
    for line in (*summary.table, *summary.lines):
        reporter.line(line)
    for line in summary.problems:
        reporter.line(line, red=True)
    for line in github.annotation_lines(reporter.config, reporter.stats):
        reporter.line(line)
