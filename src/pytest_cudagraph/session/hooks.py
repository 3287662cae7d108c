"""The pytest hooks of a run that uses the plugin, from configure to the last test. It imports no torch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cudagraph.foreign import printable_lines
from pytest_cudagraph.session import ci, devices, run_end, workers
from pytest_cudagraph.session.state_keys import (
    ADDITIONS,
    BAD_MARK,
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
    SELECTED,
    SETTINGS,
    WORKLOADS,
    marks_of,
)
from pytest_cudagraph.settings.options import read_settings
from pytest_cudagraph.settings.registered import concerns_plugin, uses_plugin

if TYPE_CHECKING:
    from pytest_cudagraph.values import GraphReport

_IDLE = tuple(
    f"--cudagraph-{name}" for name in ("base", "update", "suggest", "tune", "json", "html", "strict", "require-gpu")
)


def load_hooks(config: pytest.Config) -> None:
    """Register this module as a plugin of its own, at the first call."""
    hooks = sys.modules[__name__]
    if not config.pluginmanager.is_registered(hooks):
        config.pluginmanager.register(hooks, "cudagraph-session")


def pytest_configure(config: pytest.Config) -> None:
    """Read the settings and create the state of the session."""
    stash, worker = config.stash, getattr(config, "workerinput", {})
    gpu, why_shared = devices.gpu_of(worker)
    settings = read_settings(config, workers=worker.get("workercount", 0))
    stash[SETTINGS] = replace(settings, has_own_gpu=bool(gpu), why_shared=why_shared)
    stash[DEVICE_CONTEXTS], stash[OUTCOMES], stash[OWNERS], stash[ADDITIONS] = {}, [], {}, []
    stash[WORKLOADS], stash[CALL_LOCK] = {}, threading.RLock()
    stash[COLLECTED], stash[OURS], stash[PASSED] = set(), set(), set()
    stash[DESELECTED] = _is_narrowed(config)


def _is_narrowed(config: pytest.Config) -> bool:
    """Whether an option of pytest leaves tests out without calling a hook."""
    flags = ("ignore", "ignore_glob", "lf")
    is_set = any(config.getoption(flag, None) for flag in flags)
    return is_set or any("::" in argument for argument in config.args)


def pytest_sessionstart(session: pytest.Session) -> None:
    devices.check_machine(session.config)


def choose_tests(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, None, None]:
    """Parse every mark before the first test: a mistake fails its test or a strict run. Apply ``--cudagraph-only``.

    This is ``pytest_collection_modifyitems``. ``plugin`` calls it, because this module may be loaded during that hook.
    """
    with _usage_error_to_controller(config, items):
        for item in filter(concerns_plugin, items):
            _parse_marks(item, is_strict=config.stash[SETTINGS].strict)
    if config.stash[SETTINGS].only:
        others = [item for item in items if not _is_ours(item)]
        items[:] = [item for item in items if _is_ours(item)]
        if others:
            config.hook.pytest_deselected(items=others)
    config.stash[SELECTED] = True
    yield
    ci.choose_benchmarks(config, items)


def _parse_marks(item: pytest.Item, *, is_strict: bool) -> None:
    try:
        marks_of(item)
    except pytest.UsageError as mistake:
        if is_strict:
            raise
        item.stash[BAD_MARK] = printable_lines(str(mistake))


def _is_ours(item: pytest.Item) -> bool:
    """Whether ``--cudagraph-only`` keeps a test. A mark without a fixture is a mistake, which must be told."""
    return uses_plugin(item) or BAD_MARK in item.stash


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


@pytest.hookimpl(trylast=True)
def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Remember that tests with this plugin's fixtures were deselected: their entries are not stale."""
    if any(uses_plugin(item) for item in items):
        items[0].config.stash[DESELECTED] = True


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Remember that a file was skipped or not collected: its tests exist and did not run."""
    report = yield
    if not report.passed:
        collector.config.stash[DESELECTED] = True
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
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
        devices.open_all(config, [item for item in ours if BAD_MARK not in item.stash])


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """One line for each opened device; nothing when no test uses the plugin.

    Without ``--cudagraph``, one line that names the options without effect.
    """
    if not config.stash[SETTINGS].enabled:
        idle = [flag for flag in _IDLE if config.getoption(flag) is not None]
        return [f"cudagraph: without --cudagraph nothing is measured or written: {', '.join(idle)}"] if idle else []
    contexts = config.stash[DEVICE_CONTEXTS].values()
    if not contexts:
        return []
    from pytest_cudagraph.summary import header_line

    settings = config.stash[SETTINGS]
    lines = [
        header_line(opened.device, opened.baseline_file, settings, judged=not opened.why_not_judged)
        for opened in contexts
    ]
    return list(dict.fromkeys(lines))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Drop the results of an earlier attempt: of a test that runs again the last attempt counts.

    A test with a mistake in its marks fails here, also where it is skipped or expected to fail.
    """
    workers.forget(item.config, item.nodeid)
    item.user_properties[:] = [pair for pair in item.user_properties if not pair[0].startswith("cudagraph")]
    if BAD_MARK in item.stash:
        pytest.fail(item.stash[BAD_MARK], pytrace=False)


@pytest.hookimpl(trylast=True)
def pytest_cudagraph_judge(report: GraphReport) -> GraphReport:
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember which tests passed in all their phases: only their results may be recorded.

    This is decided at the end, because pytest-retry changes the report of a call after a second attempt.
    """
    report = yield
    workers.keep_workload(item, report)
    passed = item.config.stash[PASSED]
    passed.discard(item.nodeid)
    reports = [] if report.when == "setup" else item.stash.get(REPORTS, [])
    item.stash[REPORTS] = [] if report.when == "teardown" else [*reports, report]
    # A subtest has its test's node id, and a test with a failed subtest reports that it passed.
    if report.when == "teardown" and not any(phase.failed for phase in (*reports, report)):
        calls = [phase for phase in reports if phase.when == "call" and phase.passed and not hasattr(phase, "wasxfail")]
        passed.update([item.nodeid] if calls else [])
    return report


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable(
    config: pytest.Config, report: pytest.TestReport
) -> Generator[None, dict[str, Any], dict[str, Any]]:
    data = yield
    workers.pack(config, report, data)
    return data


def take_results(node: Any, sent: dict[str, Any]) -> None:
    """What an xdist worker sent. ``plugin`` calls it: the controller of a run may load this module for it."""
    workers.take_over(node, sent)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    devices.assign(config, specs)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    devices.tell(node)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Generator[None, None, None]:
    try:
        ci.add_benchmarks(session.config)
    finally:  # a release of pytest-benchmark that takes no arms ends the run, and no file is lost
        run_end.end(session, exitstatus)
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    run_end.show_summary(terminalreporter)
