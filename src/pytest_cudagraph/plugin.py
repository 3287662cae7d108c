"""The pytest hooks. Every pytest run loads this module, so it never imports torch."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from copy import copy
from typing import Any

import pytest

from pytest_cudagraph.decoding.fixtures import decode_engine
from pytest_cudagraph.decoding.modes.fixtures import engine_modes
from pytest_cudagraph.session import benchmarks, devices, fleet, hook_specs, lifecycle, worker_results
from pytest_cudagraph.session.fixtures import (
    assert_replay_close,
    capture_graphs,
    compile_model,
    cudagraph,
    measure_speedup,
)
from pytest_cudagraph.settings.marks import DECODE_MARK_HELP, MARK_HELP, WORKLOAD_MARK_HELP
from pytest_cudagraph.settings.options import add_options, keep_paths

# pytest finds fixtures among the names of a plugin module.
__all__ = [
    "assert_replay_close",
    "capture_graphs",
    "compile_model",
    "cudagraph",
    "decode_engine",
    "engine_modes",
    "measure_speedup",
]

pytest_plugins = ("pytest_cudagraph.serving.plugin",)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(hook_specs)


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser, args: list[str]) -> None:
    if keep_paths(args):
        paths = parser.parse_known_args(args, namespace=copy(early_config.option)).file_or_dir
        early_config.known_args_namespace.file_or_dir = paths


def pytest_configure(config: pytest.Config) -> None:
    for text in (MARK_HELP, DECODE_MARK_HELP, WORKLOAD_MARK_HELP):
        config.addinivalue_line("markers", text)
    lifecycle.begin(config)


def pytest_sessionstart(session: pytest.Session) -> None:
    devices.check_machine(session.config)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, None, None]:
    lifecycle.select(config, items)
    yield
    benchmarks.choose(config, items)


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


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    worker_results.unpack(report)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    fleet.assign(config, specs)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    fleet.tell(node)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    worker_results.receive(node)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Generator[None, None, None]:
    try:
        benchmarks.add(session.config)
    finally:  # a release of pytest-benchmark that takes no arms ends the run, and no file is lost
        lifecycle.end(session, exitstatus)
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lifecycle.summarise(terminalreporter)
