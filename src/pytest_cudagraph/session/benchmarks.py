"""The measured arms as benchmarks of pytest-benchmark's live session, for its options that save, compare and draw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cudagraph.session.state_keys import OUTCOMES, PASSED, SETTINGS
from pytest_cudagraph.settings.registered import uses_plugin

if TYPE_CHECKING:
    from pytest_cudagraph.values import BatchReport, GraphReport

_ASKS = ("json", "save", "autosave", "compare", "histogram", "only", "verbose")
"""What asks pytest-benchmark for results. Without any, its table would only repeat ours."""


class _Quantiles(SimpleNamespace):
    """The statistics of one arm, where pytest-benchmark has its own ``Stats``. It keeps no single samples."""

    data = ()

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def choose(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Under ``--cudagraph`` a test of this plugin is a benchmark for ``--benchmark-skip`` and ``--benchmark-only``.

    pytest-benchmark decides by its own fixture: it skips our tests in the second case, and runs them in the first.
    """
    live = _live_session(config)
    if live is None:
        return
    for item in filter(uses_plugin, items):
        if live.only:
            item.own_markers[:] = [mark for mark in item.own_markers if not _is_its_skip(mark)]
        elif live.skip:
            item.add_marker(pytest.mark.skip(reason="Skipping benchmark (--benchmark-skip active)."))


def _is_its_skip(mark: pytest.Mark) -> bool:
    return mark.name == "skip" and "--benchmark-only" in mark.kwargs.get("reason", "")


def add(config: pytest.Config) -> None:
    """Append the arms of this run's correct results. To be called before pytest-benchmark ends its session."""
    live = _live_session(config)
    # Under xdist it disables itself. Its oldest releases do so only in the controller.
    is_sample = config.stash[SETTINGS].sample is not None
    if live is None or live.disabled or is_sample or hasattr(config, "workerinput"):
        return
    if not any(getattr(live, name, False) for name in _ASKS):
        return
    for report in config.stash[OUTCOMES]:
        live.benchmarks.extend(_benchmarks(report, has_passed=report.nodeid in config.stash[PASSED]))


def _live_session(config: pytest.Config) -> Any:
    """Its session. None where it is blocked, or where this plugin measures nothing."""
    return config.pluginmanager.get_plugin("pytest-benchmark") if config.stash[SETTINGS].enabled else None


def _benchmarks(report: GraphReport, *, has_passed: bool) -> Iterator[Any]:
    from datetime import datetime, timezone

    from pytest_cudagraph import baseline, record
    from pytest_cudagraph.values import Verdict

    if report.device is None or report.verdict in (Verdict.WRONG, Verdict.NOT_CAPTURED):
        return
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    for batch in report.batches:
        if batch.timing is not None and batch.has_entry:
            for found in baseline.records_of(record.saved_batch(report, batch, saved_at=now)):
                yield _benchmark(found, batch, has_passed=has_passed)


def _benchmark(found: dict[str, Any], batch: BatchReport, *, has_passed: bool) -> Any:
    """A record of a baseline file as pytest-benchmark's own object.

    It shows and compares results with an error, and saves none of them. So a saved run never holds a regression that
    this plugin has found.
    """
    from pytest_benchmark import stats

    found["extra_info"]["cudagraph"]["verdict"] = batch.word
    fixture = SimpleNamespace(**found, cprofile_stats=None, has_error=not has_passed)
    untyped: Any = stats
    benchmark = untyped.Metadata(fixture, iterations=found["stats"].pop("iterations"), options=found["options"])
    benchmark.stats = _Quantiles(**found["stats"])
    return benchmark
