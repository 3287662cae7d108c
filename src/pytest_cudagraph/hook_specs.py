"""The hooks that this plugin offers to other plugins and to conftest files. Later versions only add arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pytest_cudagraph.errors import GraphTestFailure
    from pytest_cudagraph.protocols import Backend
    from pytest_cudagraph.session.context import FixtureContext
    from pytest_cudagraph.settings.case import ModelCall
    from pytest_cudagraph.settings.registered import FeatureMark
    from pytest_cudagraph.values import AuditRule, DeviceInfo, GraphReport, ReportColumn, Table


def pytest_cudagraph_report(config: pytest.Config, report: GraphReport) -> None:
    """Called for each report at the end of the run, in the process that shows the summary.

    Under xdist that is the controller. The report is frozen. If it raises, the summary says so, and the run fails.
    """


def pytest_cudagraph_model_passed(context: FixtureContext, call: ModelCall, report: GraphReport) -> None:
    """Called after a call of ``cudagraph`` has passed, within its test and under ``--cudagraph``.

    ``context.add`` keeps what the document and the summary of the run are to say of it. If it raises, the test fails.
    """


@pytest.hookspec(firstresult=True)
def pytest_cudagraph_judge(context: FixtureContext, report: GraphReport) -> GraphReport:
    """The report with the judgements of further gates, before its test passes or fails.

    Implement it as a wrapper, and return the report that ``yield`` gives, or one made of it. If it raises, the test
    fails.
    """
    return report


def pytest_cudagraph_tables(config: pytest.Config, reports: Sequence[GraphReport]) -> Sequence[Table]:
    """More tables of the run: the summary, the page and the document have them."""
    return ()


def pytest_cudagraph_terminal_columns(config: pytest.Config) -> Sequence[ReportColumn]:
    """More columns for the table of the summary, to the left of the verdict."""
    return ()


def pytest_cudagraph_marks(config: pytest.Config) -> Sequence[FeatureMark]:
    """Marks of features, each with its text, its arguments and the fixtures that it is for.

    Called in the configuration of pytest and after the collection, so by plugins and by the first ``conftest.py``.
    """
    return ()


def pytest_cudagraph_methods(config: pytest.Config) -> Mapping[str, Callable[..., Any]]:
    """Further methods of the fixture ``cudagraph``, by name. Each takes the test's ``FixtureContext`` first."""
    return {}


def pytest_cudagraph_failures(config: pytest.Config) -> Mapping[str, type[GraphTestFailure]]:
    """The exception of a failed gate of a feature, by the name of the gate."""
    return {}


def pytest_cudagraph_audit_rules(config: pytest.Config) -> Sequence[AuditRule]:
    """Rules for custom operators: which of them a capture refuses, and which are legal."""
    return ()


def pytest_cudagraph_backends(config: pytest.Config) -> Mapping[str, Callable[[], tuple[Backend, DeviceInfo]]]:
    """Backends by the name for ``--cudagraph-device``. The function opens one and describes its device."""
    return {}
