"""Options, marks and fixtures. Every pytest run loads this module, so it imports next to nothing.

All other hooks are those of ``session.hooks``. A run that needs one loads them all.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cudagraph import hook_specs
from pytest_cudagraph.settings.registered import MARK_HELPS, add_options, added_marks, concerns_plugin, is_any_set

if TYPE_CHECKING:
    from types import ModuleType

    from pytest_cudagraph.session.fixtures import (
        AssertReplayClose,
        CaptureGraphs,
        CompileModel,
        Cudagraph,
        MeasureSpeedup,
    )

_SENT = "pytest_cudagraph"
"""The key of what an xdist worker sends with a report and at its end."""

pytest_plugins = (
    "pytest_cudagraph.decoding.plugin",
    "pytest_cudagraph.own_graphs.plugin",
    "pytest_cudagraph.serving.plugin",
)
"""The features. ``base_revision.plugin`` is one too, registered when an option or a fixture is used."""


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(hook_specs)


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    for text in (*MARK_HELPS, *(mark.help for mark in added_marks(config))):
        config.addinivalue_line("markers", text)
    if is_any_set(config):
        _session_hooks(config)


def _session_hooks(config: pytest.Config) -> ModuleType:
    from pytest_cudagraph.base_revision import plugin as base
    from pytest_cudagraph.session import hooks

    hooks.load_hooks(config)
    if not config.pluginmanager.is_registered(base):
        config.pluginmanager.register(base, "cudagraph-base-revision")
    return hooks


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, None, None]:
    if config.pluginmanager.has_plugin("cudagraph-session") or any(map(concerns_plugin, items)):
        # Hooks that are registered now are not called for what is under way.
        yield from _session_hooks(config).choose_tests(config, items)
    else:
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if _SENT in vars(report):
        node: Any = report.node
        _session_hooks(node.config).take_results(node, vars(report).pop(_SENT))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    # A worker that died has sent nothing.
    sent = getattr(node, "workeroutput", {}).get(_SENT)
    if sent:
        _session_hooks(node.config).take_results(node, sent)


@pytest.fixture
def cudagraph(request: pytest.FixtureRequest) -> Iterator[Cudagraph]:
    """Run all stages of a model: audit, compile, capture, check, measure, gate, record."""
    from pytest_cudagraph.session import fixtures

    yield from fixtures.open_fixture(request, fixtures.Cudagraph)


@pytest.fixture
def compile_model(request: pytest.FixtureRequest) -> Iterator[CompileModel]:
    """Compile a model for every batch size, without capturing it."""
    from pytest_cudagraph.session import fixtures

    yield from fixtures.open_fixture(request, fixtures.CompileModel)


@pytest.fixture
def capture_graphs(request: pytest.FixtureRequest) -> Iterator[CaptureGraphs]:
    """Capture one graph per batch size, of a model or of what ``compile_model`` gave."""
    from pytest_cudagraph.session import fixtures

    yield from fixtures.open_fixture(request, fixtures.CaptureGraphs)


@pytest.fixture
def assert_replay_close(request: pytest.FixtureRequest) -> Iterator[AssertReplayClose]:
    """Check that the graphs of ``capture_graphs`` replay what eager computes."""
    from pytest_cudagraph.session import fixtures

    yield from fixtures.open_fixture(request, fixtures.AssertReplayClose)


@pytest.fixture
def measure_speedup(request: pytest.FixtureRequest) -> Iterator[MeasureSpeedup]:
    """Measure the graphs of ``capture_graphs`` against eager, and gate them."""
    from pytest_cudagraph.session import fixtures

    yield from fixtures.open_fixture(request, fixtures.MeasureSpeedup)
