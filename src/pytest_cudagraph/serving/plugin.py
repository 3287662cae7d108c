"""What serving adds to pytest: the fixtures ``tune`` and ``perf_monitor``, and ``--cudagraph-tune``.

It uses the hooks that every plugin can use. Every pytest run imports this module, so it imports little.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_cudagraph.serving.fixtures import MonitorOfTest, Tune
    from pytest_cudagraph.session.context import FixtureContext
    from pytest_cudagraph.settings.case import ModelCall
    from pytest_cudagraph.values import GraphReport


@pytest.fixture
def tune(request: pytest.FixtureRequest) -> Iterator[Tune]:
    """Measure batch sizes, compile modes and graphs in combination, and find the best one that is correct."""
    from pytest_cudagraph.serving.fixtures import Tune
    from pytest_cudagraph.session.context import FixtureContext

    with ExitStack() as resources:
        yield Tune(FixtureContext(request, resources))


@pytest.fixture
def perf_monitor(request: pytest.FixtureRequest) -> Iterator[MonitorOfTest]:
    """Watch host and GPU while a block runs, and record the calls of serving code."""
    from pytest_cudagraph.serving.fixtures import MonitorOfTest
    from pytest_cudagraph.session.context import FixtureContext

    monitor = MonitorOfTest()
    yield monitor
    monitor.keep(FixtureContext(request))


def pytest_cudagraph_model_passed(context: FixtureContext, call: ModelCall, report: GraphReport) -> None:
    """Tune the model under ``--cudagraph-tune``."""
    if context.settings.tune:
        from pytest_cudagraph.serving.fixtures import tune_after

        tune_after(context, call, report.name)
