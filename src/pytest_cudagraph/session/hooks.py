"""The pytest hooks of a run that uses the plugin. It imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from typing import Any

import pytest

from pytest_cudagraph.session import benchmarks, devices, fleet, lifecycle, worker_results


def load_hooks(config: pytest.Config) -> None:
    """Register this module as a plugin of its own, at the first call."""
    hooks = sys.modules[__name__]
    if not config.pluginmanager.is_registered(hooks):
        config.pluginmanager.register(hooks, "cudagraph-session")


def pytest_configure(config: pytest.Config) -> None:
    lifecycle.begin(config)


def pytest_sessionstart(session: pytest.Session) -> None:
    devices.check_machine(session.config)


def choose_tests(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, None, None]:
    """``pytest_collection_modifyitems``: ``plugin`` calls it, because this module may be loaded during that hook."""
    lifecycle.select(config, items)
    yield
    benchmarks.choose(config, items)


def take_results(node: Any, sent: dict[str, Any]) -> None:
    """What an xdist worker sent. ``plugin`` calls it: the controller of a run may load this module for it."""
    worker_results.take_over(node, sent)


@pytest.hookimpl(trylast=True)
def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    lifecycle.note_deselected(items)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    lifecycle.note_collected(collector, report)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    lifecycle.open_devices(session)


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    return lifecycle.header(config)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    lifecycle.compare_revisions(session)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    lifecycle.begin_test(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    lifecycle.note_result(item, report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable(
    config: pytest.Config, report: pytest.TestReport
) -> Generator[None, dict[str, Any], dict[str, Any]]:
    data = yield
    worker_results.pack(config, report, data)
    return data


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    fleet.assign(config, specs)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    fleet.tell(node)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Generator[None, None, None]:
    try:
        benchmarks.add(session.config)
    finally:  # a release of pytest-benchmark that takes no arms ends the run, and no file is lost
        lifecycle.end(session, exitstatus)
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lifecycle.summarise(terminalreporter)
