"""What other tools show of a run: pytest-benchmark's live session, and the step summary and annotations of GitHub."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cudagraph import report
from pytest_cudagraph.foreign import printable
from pytest_cudagraph.session.state_keys import OURS, OUTCOMES, PASSED, SETTINGS
from pytest_cudagraph.settings.registered import uses_plugin
from pytest_cudagraph.values import Site

if TYPE_CHECKING:
    from pytest_cudagraph.settings.options import Settings
    from pytest_cudagraph.summary import RunSummary
    from pytest_cudagraph.values import BatchReport, GraphReport

_ASKS = ("json", "save", "autosave", "compare", "histogram", "only", "verbose")
"""What asks pytest-benchmark for results. Without any, its table would only repeat ours."""


class _Quantiles(SimpleNamespace):
    """The statistics of one arm, where pytest-benchmark has its own ``Stats``. It keeps no single samples."""

    data = ()

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def choose_benchmarks(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
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


def add_benchmarks(config: pytest.Config) -> None:
    """Append the arms of this run's correct results. To be called before pytest-benchmark ends its session."""
    live = _live_session(config)
    # Under xdist it disables itself. Its oldest releases do so only in the controller.
    is_sample = config.stash[SETTINGS].sample is not None
    if live is None or live.disabled or is_sample or hasattr(config, "workerinput"):
        return
    if not any(getattr(live, name, False) for name in _ASKS):
        return
    for measured in config.stash[OUTCOMES]:
        live.benchmarks.extend(_benchmarks(measured, has_passed=measured.nodeid in config.stash[PASSED]))


def _live_session(config: pytest.Config) -> Any:
    """Its session. None where it is blocked, or where this plugin measures nothing."""
    return config.pluginmanager.get_plugin("pytest-benchmark") if config.stash[SETTINGS].enabled else None


def _benchmarks(measured: GraphReport, *, has_passed: bool) -> Iterator[Any]:
    from datetime import datetime

    from pytest_cudagraph import baseline, record
    from pytest_cudagraph.values import Verdict

    if measured.device is None or measured.verdict in (Verdict.WRONG, Verdict.NOT_CAPTURED):
        return
    now = datetime.now(UTC).isoformat(timespec="seconds")
    for batch in measured.batches:
        if batch.timing is not None and batch.has_entry:
            for entry in baseline.records_of(record.saved_batch(measured, batch, saved_at=now)):
                yield _benchmark(entry, batch, has_passed=has_passed)


def _benchmark(entry: dict[str, Any], batch: BatchReport, *, has_passed: bool) -> Any:
    """A record of a baseline file as pytest-benchmark's own object.

    It shows and compares results with an error, and saves none of them. So a saved run never holds a regression that
    this plugin has found.
    """
    from pytest_benchmark import stats

    entry["extra_info"]["cudagraph"]["verdict"] = batch.word
    fixture = SimpleNamespace(**entry, cprofile_stats=None, has_error=not has_passed)
    untyped: Any = stats
    benchmark = untyped.Metadata(fixture, iterations=entry["stats"].pop("iterations"), options=entry["options"])
    benchmark.stats = _Quantiles(**entry["stats"])
    return benchmark


def write_step_summary(reports: Sequence[GraphReport], summary: RunSummary, settings: Settings) -> RunSummary:
    """Append the run to the file that GitHub shows. A line of the summary says so if that fails."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if not (_is_wanted(settings) and path and (reports or summary.problems)):
        return summary
    closing = (*summary.lines, *summary.problems)
    try:
        # A pipe would be waited for until somebody reads it.
        if Path(path).exists() and not Path(path).is_file():
            raise OSError(errno.EINVAL, "only a regular file is written", path)
        # Other commands of the same step may have written to it.
        with Path(path).open("ab") as file:
            room = report.STEP_SUMMARY_BYTES - file.tell()
            text = report.step_summary(reports, closing, room_bytes=room, is_strict=settings.strict)
            file.write(text.encode())
        reason = "" if text else "the step has written 1 MiB already"
    except (OSError, ValueError) as error:
        # ValueError: a path with a null character.
        reason = getattr(error, "strerror", None) or str(error)
    warning = printable(f"warning: nothing was written to GITHUB_STEP_SUMMARY ({path}): {reason}")
    return replace(summary, lines=(*summary.lines, warning)) if reason else summary


def _is_wanted(settings: Settings) -> bool:
    return settings.github == "auto" and os.environ.get("GITHUB_ACTIONS") == "true"


def annotation_lines(config: pytest.Config, stats: Mapping[str, Sequence[Any]]) -> list[str]:
    """One line for each failing test that used the plugin, in the order of the log. ``stats`` are the terminal's."""
    if not _is_wanted(config.stash[SETTINGS]):
        return []
    of_test: dict[str, list[GraphReport]] = {nodeid: [] for nodeid in config.stash[OURS]}
    for measured in config.stash[OUTCOMES]:
        of_test.setdefault(measured.nodeid, []).append(measured)
    failed: dict[str, Any] = {}
    for test in (*stats.get("failed", ()), *stats.get("error", ())):
        failed.setdefault(test.nodeid, test)
    return [_annotation(config, test, of_test[nodeid]) for nodeid, test in failed.items() if nodeid in of_test]


def _annotation(config: pytest.Config, test: pytest.TestReport, reports: Sequence[GraphReport]) -> str:
    file, line, _ = test.location
    of_test = Site(file=str(config.rootpath / file), line=(line or 0) + 1)
    site = next(_in_workspace(config, (*_sites(test, reports), of_test)), replace(of_test, file=file))
    crash = getattr(test.longrepr, "reprcrash", None)
    message = crash.message if crash else test.longreprtext
    return report.annotation(message, title=test.nodeid, file=site.file, line=site.line)


def _sites(test: pytest.TestReport, reports: Sequence[GraphReport]) -> Iterator[Site]:
    """The user's lines that may be to blame, the best one first: of hazards, then of the traceback."""
    for measured in reports:
        yield from report.sites_of_failure(measured)
    trace: Any = getattr(test.longrepr, "reprtraceback", None)
    for entry in reversed(trace.reprentries if trace else ()):
        place = getattr(entry, "reprfileloc", None)
        if place is not None:
            yield Site(file=place.path, line=place.lineno)


def _in_workspace(config: pytest.Config, sites: Iterable[Site]) -> Iterator[Site]:
    """Those below the checkout, with the file as GitHub names it. Installed libraries may lie there too."""
    workspace = Path(os.path.abspath(os.environ.get("GITHUB_WORKSPACE") or config.rootpath))  # noqa: PTH100
    for site in sites:
        path = Path(os.path.abspath(config.invocation_params.dir / site.file))  # noqa: PTH100
        if path.is_relative_to(workspace) and "site-packages" not in path.parts:
            yield replace(site, file=path.relative_to(workspace).as_posix())
