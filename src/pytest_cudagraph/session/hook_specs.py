"""The hooks that this plugin offers to other plugins and to conftest files. Later versions only add arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

import pytest

from pytest_cudagraph.foreign import message_of

if TYPE_CHECKING:
    from pytest_cudagraph.protocols import Backend
    from pytest_cudagraph.session.context import FixtureContext
    from pytest_cudagraph.settings.case import ModelCall
    from pytest_cudagraph.values import AuditRule, DeviceInfo, GraphReport, ReportColumn

_T = TypeVar("_T")


def pytest_cudagraph_report(config: pytest.Config, report: GraphReport) -> None:
    """Called for each report at the end of the run, in the process that shows the summary.

    Under xdist that is the controller. The report is frozen. If it raises, the summary says so, and the run fails.
    """


def pytest_cudagraph_model_passed(context: FixtureContext, call: ModelCall, report: GraphReport) -> None:
    """Called after a call of ``cudagraph`` has passed, within its test and under ``--cudagraph``.

    ``context.add`` keeps what the document and the summary of the run are to say of it. If it raises, the test fails.
    """


def pytest_cudagraph_terminal_columns(config: pytest.Config) -> Sequence[ReportColumn]:
    """More columns for the table of the summary, to the left of the verdict."""
    return ()


def pytest_cudagraph_audit_rules(config: pytest.Config) -> Sequence[AuditRule]:
    """Rules for custom operators: which of them a capture refuses, and which are legal."""
    return ()


def pytest_cudagraph_backends(config: pytest.Config) -> Mapping[str, Callable[[], tuple[Backend, DeviceInfo]]]:
    """Backends by the name for ``--cudagraph-device``. The function opens one and describes its device."""
    return {}


def joined(results: Iterable[Iterable[_T]]) -> tuple[_T, ...]:
    """What all plugins returned, in pytest's order of them."""
    return tuple(chain.from_iterable(results))


def call_at_end(
    config: pytest.Config, reports: Iterable[GraphReport]
) -> tuple[tuple[ReportColumn, ...], tuple[str, ...]]:
    """Give every report to the other plugins. Return their columns, and what their hooks raised."""
    try:
        columns = joined(config.hook.pytest_cudagraph_terminal_columns(config=config))
        for report in reports:
            config.hook.pytest_cudagraph_report(config=config, report=report)
    # The code of another plugin may raise anything. The files and the table are still made.
    except Exception as error:
        raised = f"{type(error).__name__}: {message_of(error)}"
        return (), (f"a hook pytest_cudagraph_* of another plugin raised {raised}",)
    return columns, ()
