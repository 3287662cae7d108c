"""A run on GitHub Actions writes the summary of its step, and annotates the lines of its failing tests."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cudagraph import report
from pytest_cudagraph.foreign import printable
from pytest_cudagraph.session.state_keys import OURS, OUTCOMES, SETTINGS
from pytest_cudagraph.values import GraphReport, Site

if TYPE_CHECKING:
    from pytest_cudagraph.settings.options import Settings
    from pytest_cudagraph.summary import RunSummary


def write_step_summary(reports: Sequence[GraphReport], summary: RunSummary, settings: Settings) -> RunSummary:
    """Append the run to the file that GitHub shows. A line of the summary says so if that fails."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if not (_is_wanted(settings) and path and (reports or summary.problems)):
        return summary
    closing = (*summary.lines, *summary.problems)
    try:
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
    own: dict[str, list[GraphReport]] = {nodeid: [] for nodeid in config.stash[OURS]}
    for each in config.stash[OUTCOMES]:
        own.setdefault(each.nodeid, []).append(each)
    failed: dict[str, Any] = {}
    for test in (*stats.get("failed", ()), *stats.get("error", ())):
        failed.setdefault(test.nodeid, test)
    return [_annotation(config, test, own[nodeid]) for nodeid, test in failed.items() if nodeid in own]


def _annotation(config: pytest.Config, test: pytest.TestReport, reports: Sequence[GraphReport]) -> str:
    file, line, _ = test.location
    own = Site(file=str(config.rootpath / file), line=(line or 0) + 1)
    site = next(_in_workspace(config, (*_sites(test, reports), own)), replace(own, file=file))
    crash = getattr(test.longrepr, "reprcrash", None)
    message = crash.message if crash else test.longreprtext
    return report.annotation(message, title=test.nodeid, file=site.file, line=site.line)


def _sites(test: pytest.TestReport, reports: Sequence[GraphReport]) -> Iterator[Site]:
    """The user's lines that may be to blame, the best one first: of hazards, then of the traceback."""
    for each in reports:
        yield from report.sites_of_failure(each)
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
