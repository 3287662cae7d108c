"""Calls of the hooks of other plugins."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

import pytest

from pytest_cudagraph.foreign import message_of

if TYPE_CHECKING:
    from pytest_cudagraph.values import GraphReport, ReportColumn

_T = TypeVar("_T")


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
