"""The state of a session: typed keys of ``config.stash`` and ``item.stash``. No other state exists."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_cudagraph.pipeline import DeviceContext
    from pytest_cudagraph.settings.marks import MarkSettings
    from pytest_cudagraph.settings.options import Settings
    from pytest_cudagraph.summary import RunSummary
    from pytest_cudagraph.values import Addition, GraphReport

SETTINGS: pytest.StashKey[Settings] = pytest.StashKey()
DEVICE_CONTEXTS: pytest.StashKey[dict[str, DeviceContext]] = pytest.StashKey()
"""Opened devices by the value of the device option."""
OUTCOMES: pytest.StashKey[list[GraphReport]] = pytest.StashKey()
ADDITIONS: pytest.StashKey[list[Addition]] = pytest.StashKey()
"""What features add to the document and the summary."""
WORKLOADS: pytest.StashKey[dict[str, dict[str, Any]]] = pytest.StashKey()
"""The tests with the mark ``workload``, by node id: plain data for the JSON document."""
PASSED: pytest.StashKey[set[str]] = pytest.StashKey()
"""Node ids of tests that passed in all their phases. Only their results may be recorded."""
REPORTS: pytest.StashKey[list[pytest.TestReport]] = pytest.StashKey()
"""On the item: the reports of the current attempt."""
COLLECTED: pytest.StashKey[set[str]] = pytest.StashKey()
"""Node ids of all tests of this run. :data:`OURS` has those with this plugin's fixtures."""
OURS: pytest.StashKey[set[str]] = pytest.StashKey()
SELECTED: pytest.StashKey[bool] = pytest.StashKey()
"""Whether the tests to run are known. Absent after a collection error."""
DESELECTED: pytest.StashKey[bool] = pytest.StashKey()
"""Whether the run left tests out. Then no entry is stale."""
RUN_SUMMARY: pytest.StashKey[RunSummary] = pytest.StashKey()
MARKS: pytest.StashKey[MarkSettings] = pytest.StashKey()
"""On the item: its marks, parsed at collection. Read them with :func:`marks_of`."""
BAD_MARK: pytest.StashKey[str] = pytest.StashKey()
"""On the item: what is wrong with its marks, which its setup tells. Absent without a mistake."""
MISTAKE: pytest.StashKey[str] = pytest.StashKey()
"""In an xdist worker: the usage error that the controller raises. Absent without one."""
WHY_SHARED: pytest.StashKey[str] = pytest.StashKey()
"""Why this run, or xdist's workers in their controller, have no GPU of their own. Absent without a GPU."""
CALL_LOCK: pytest.StashKey[Any] = pytest.StashKey()
"""A re-entrant lock, held by the thread that uses a fixture."""
OWNERS: pytest.StashKey[dict[tuple[str, str, int], str]] = pytest.StashKey()
"""The test that measures an entry, by device, name and batch size."""


def marks_of(item: pytest.Item) -> MarkSettings:
    """A test's marks. They are parsed here for a test that another plugin created after the collection.

    Raises :class:`pytest.UsageError` for invalid marks.
    """
    if MARKS not in item.stash:
        from pytest_cudagraph.settings.marks import read_marks

        item.stash[MARKS] = read_marks(item)
    return item.stash[MARKS]
