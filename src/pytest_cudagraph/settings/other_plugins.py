"""The calls of this plugin's hooks in other plugins. What a hook raises, or returns by mistake, is told in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from pytest_cudagraph.errors import CudagraphError
from pytest_cudagraph.foreign import message_of, value_text
from pytest_cudagraph.settings.parsing import DEVICES, one_of

if TYPE_CHECKING:
    from pytest_cudagraph.values import AuditRule, GraphReport, ReportColumn, Table

_T = TypeVar("_T")

RAISED = (Exception, SystemExit, pytest.fail.Exception, pytest.skip.Exception)
"""What foreign code may raise to end a test. ``pytest.fail`` and ``pytest.skip`` raise no ``Exception``."""


@contextmanager
def _one_line(hook: str) -> Iterator[None]:
    try:
        yield
    except RAISED as error:
        raise CudagraphError(hook_text(hook, error)) from error


def hook_text(hook: str, error: BaseException) -> str:
    """What a hook raised, in one line."""
    return f"the hook {hook} of another plugin raised {type(error).__name__}: {message_of(error)}"


def _results(config: pytest.Config, hook: str, kind: type[_T], **arguments: object) -> tuple[_T, ...]:
    """What all plugins return for a hook, in pytest's order of them."""
    with _one_line(hook):
        answers = getattr(config.hook, hook)(config=config, **arguments)
        results = [result for answer in answers for result in answer]
    for result in results:
        if not isinstance(result, kind):
            raise CudagraphError(
                f"the hook {hook} takes a list of {kind.__name__} from each plugin; found {value_text(result)}"
            )
    return tuple(results)


def audit_rules(config: pytest.Config) -> tuple[AuditRule, ...]:
    """The rules for custom operators. Raises :class:`~pytest_cudagraph.errors.CudagraphError`."""
    from pytest_cudagraph.values import AuditRule

    return _results(config, "pytest_cudagraph_audit_rules", AuditRule)


def columns(config: pytest.Config) -> tuple[ReportColumn, ...]:
    """The columns for the table, whose cells never raise. Raises :class:`~pytest_cudagraph.errors.CudagraphError`."""
    from pytest_cudagraph.values import ReportColumn

    added = _results(config, "pytest_cudagraph_terminal_columns", ReportColumn)
    return tuple(replace(column, title=str(column.title), cell=_safe(column.cell)) for column in added)


def tables(config: pytest.Config, reports: Sequence[GraphReport]) -> tuple[Table, ...]:
    """The tables of the run. Raises :class:`~pytest_cudagraph.errors.CudagraphError`."""
    from pytest_cudagraph.values import Table

    return _results(config, "pytest_cudagraph_tables", Table, reports=reports)


def _safe(cell: Callable[[Any, Any], object]) -> Callable[[Any, Any], str]:
    def text(report: Any, batch: Any) -> str:
        try:
            return str(cell(report, batch))
        except RAISED as error:
            return f"<{type(error).__name__}>"

    return text


def hand_over(config: pytest.Config, reports: Iterable[GraphReport]) -> list[str]:
    """Give every report to the other plugins. Return what their hooks raised, each text once."""
    problems = []
    for report in reports:
        try:
            with _one_line("pytest_cudagraph_report"):
                config.hook.pytest_cudagraph_report(config=config, report=report)
        except CudagraphError as error:
            problems.append(str(error))
    return list(dict.fromkeys(problems))


def backends(config: pytest.Config) -> dict[str, Callable[[], Any]]:
    """What opens each backend of other plugins, by name. All raise :class:`~pytest_cudagraph.errors.CudagraphError`."""
    hook = "pytest_cudagraph_backends"
    with _one_line(hook):
        mappings = config.hook.pytest_cudagraph_backends(config=config)
        return {str(name): _one_line(hook)(make) for mapping in mappings for name, make in mapping.items()}


def device_of(config: pytest.Config) -> Callable[[Any], str]:
    """Parses a device: one of this plugin's, or one that another plugin brings."""
    try:
        return one_of(*DEVICES, *backends(config))
    except CudagraphError as error:
        raise pytest.UsageError(str(error)) from error
