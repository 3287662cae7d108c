"""Send the results of an xdist worker to the controller, and drop those of a test that runs again."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pytest_cudagraph.foreign import first_line_of
from pytest_cudagraph.session.devices import gpu_of
from pytest_cudagraph.session.state_keys import (
    ADDITIONS,
    COLLECTED,
    DESELECTED,
    MARKS,
    MISTAKE,
    OURS,
    OUTCOMES,
    PASSED,
    WORKLOADS,
)
from pytest_cudagraph.values import Addition, GraphReport

_WORKER_KEY = "pytest_cudagraph"
_SETS = {PASSED: "passed", COLLECTED: "collected", OURS: "ours"}


def keep_workload(item: pytest.Item, report: pytest.TestReport) -> None:
    """Keep a test with the mark ``workload``, and why it failed, for the rankings: no cell is lost."""
    marks = item.stash.get(MARKS, None)
    if marks is None or marks.workload is None:
        return
    entry = {"nodeid": item.nodeid, **marks.workload._asdict(), "error": None}
    kept = item.config.stash[WORKLOADS].setdefault(item.nodeid, entry)
    if not report.passed:
        kept["error"] = _reason_of(report)
    elif report.when in ("setup", "call"):
        # An xdist worker that dies leaves the first of them.
        kept["error"] = "the test did not end" if report.when == "setup" else None


def _reason_of(report: pytest.TestReport) -> str:
    """The first line of the exception, or why the test was skipped."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(crash, "message", "")
    return first_line_of(str(text or report.longreprtext or report.outcome))


def forget(config: pytest.Config, nodeid: str) -> None:
    """Drop the reports of a test."""
    outcomes, additions = config.stash[OUTCOMES], config.stash[ADDITIONS]
    outcomes[:] = [report for report in outcomes if report.nodeid != nodeid]
    additions[:] = [addition for addition in additions if addition.nodeid != nodeid]
    config.stash[WORKLOADS].pop(nodeid, None)


def pack(config: pytest.Config, report: pytest.TestReport, data: dict[str, Any]) -> None:
    """In an xdist worker, send results with the test's own report, because a later test may end the process."""
    ours = getattr(report, "nodeid", None) in config.stash[OURS]
    when = getattr(report, "when", None) if ours and hasattr(config, "workerinput") else None
    if when == "setup":
        data[_WORKER_KEY] = {"outcomes": "[]", "begun": report.nodeid}
    elif when in ("call", "teardown"):
        # A test has passed only after its teardown.
        has_passed = when == "teardown" and report.nodeid in config.stash[PASSED]
        data[_WORKER_KEY] = {
            "outcomes": _take_outcomes(config),
            "additions": _take_additions(config),
            "passed": [report.nodeid] * has_passed,
        }
        # A second attempt of pytest-retry reports no setup.
        data[_WORKER_KEY] |= {"begun": report.nodeid} if when == "call" else {}
    if when is not None:
        kept = config.stash[WORKLOADS]
        data[_WORKER_KEY]["workloads"] = json.dumps([kept[report.nodeid]] if report.nodeid in kept else [])


def take_over(node: Any, sent: dict[str, Any]) -> None:
    """In the controller, take what a worker sent with a test's report or at its end."""
    from pytest_cudagraph.report import from_plain

    config, (gpu, _) = node.config, gpu_of(node.workerinput)
    stash = config.stash
    if sent.get("mistake"):
        raise pytest.UsageError(sent["mistake"])
    forget(config, sent.get("begun", ""))
    stash[OUTCOMES].extend(replace(from_plain(GraphReport, plain), gpu=gpu) for plain in json.loads(sent["outcomes"]))
    stash[ADDITIONS].extend(from_plain(Addition, plain) for plain in json.loads(sent.get("additions", "[]")))
    stash[WORKLOADS].update((entry["nodeid"], entry) for entry in json.loads(sent.get("workloads", "[]")))
    for key, name in _SETS.items():
        stash[key].update(sent.get(name, ()))
    stash[DESELECTED] = stash[DESELECTED] or sent.get("deselected", False)


def _take_outcomes(config: pytest.Config) -> str:
    """The reports as JSON in ASCII. Between workers no text may hold a lone surrogate, as a name may."""
    from pytest_cudagraph.report import report_to_plain

    outcomes = config.stash[OUTCOMES]
    taken = json.dumps([report_to_plain(report) for report in outcomes])
    outcomes.clear()
    return taken


def _take_additions(config: pytest.Config) -> str:
    from pytest_cudagraph.report import to_plain

    additions = config.stash[ADDITIONS]
    taken = json.dumps([to_plain(addition, public=True) for addition in additions])
    additions.clear()
    return taken


def send(config: Any) -> None:
    """Send the rest of the worker's results to the controller."""
    stash = config.stash
    config.workeroutput[_WORKER_KEY] = {
        "outcomes": _take_outcomes(config),
        "collected": sorted(stash[COLLECTED]),
        "ours": sorted(stash[OURS]),
        "deselected": stash[DESELECTED],
        "mistake": stash.get(MISTAKE, ""),
    }
