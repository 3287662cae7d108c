"""The one home for state: typed keys into ``config.stash`` and ``item.stash``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_cudagraph.base_revision.comparison import AgainstBase
    from pytest_cudagraph.pipeline import DeviceContext
    from pytest_cudagraph.settings.marks import MarkSettings
    from pytest_cudagraph.settings.options import Settings
    from pytest_cudagraph.summary import RunSummary
    from pytest_cudagraph.values import GraphReport

SETTINGS: pytest.StashKey[Settings] = pytest.StashKey()
DEVICE_CONTEXTS: pytest.StashKey[dict[str, DeviceContext]] = pytest.StashKey()
"""Opened devices by the option that asked for them."""
BASE: pytest.StashKey[AgainstBase] = pytest.StashKey()
"""What ``--cudagraph-base`` has found before the first test; absent without it."""
OUTCOMES: pytest.StashKey[list[GraphReport]] = pytest.StashKey()
PASSED: pytest.StashKey[set[str]] = pytest.StashKey()
"""Node ids of tests that passed as a whole; only what they showed may be recorded."""
BROKEN: pytest.StashKey[bool] = pytest.StashKey()
"""On the item: whether a part of the run that is under way has failed; a rerun begins anew."""
COLLECTED: pytest.StashKey[set[str]] = pytest.StashKey()
"""Node ids of all tests of this run, and of those of ours alone under :data:`OURS`."""
OURS: pytest.StashKey[set[str]] = pytest.StashKey()
SELECTED: pytest.StashKey[bool] = pytest.StashKey()
"""Whether the tests to run are known; absent where collecting them ended in an error."""
DESELECTED: pytest.StashKey[bool] = pytest.StashKey()
"""Whether the run left tests out; then a saved entry without a test says nothing."""
RUN_SUMMARY: pytest.StashKey[RunSummary] = pytest.StashKey()
MARKS: pytest.StashKey[MarkSettings] = pytest.StashKey()
"""On the item: its marks, parsed at collection; :func:`marks_of` reads them."""
MISTAKE: pytest.StashKey[str] = pytest.StashKey()
"""In an xdist worker: the usage error that the controller is to end the run with; absent without one."""
CALL_LOCK: pytest.StashKey[Any] = pytest.StashKey()
"""A re-entrant lock, held by the thread that tells a story."""
OWNERS: pytest.StashKey[dict[tuple[str, str, int], str]] = pytest.StashKey()
"""Which test's are the entries of a device, a name and a batch size."""


def marks_of(item: pytest.Item) -> MarkSettings:
    """A test's marks; read only now where another plugin made the test after all others' were read.

    Raises :class:`pytest.UsageError` for marks that cannot be.
    """
    if MARKS not in item.stash:
        from pytest_cudagraph.settings.marks import read_marks

        item.stash[MARKS] = read_marks(item)
    return item.stash[MARKS]
