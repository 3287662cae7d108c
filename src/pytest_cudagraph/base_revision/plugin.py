"""What ``--cudagraph-base`` adds to pytest. A run that uses the plugin registers this module."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace

import pytest

from pytest_cudagraph.base_revision.comparison import AgainstBase, compare_revisions
from pytest_cudagraph.base_revision.judge import base_tables, judge_base
from pytest_cudagraph.base_revision.processes import Command, record_base_run
from pytest_cudagraph.errors import GraphTestFailure, RevisionError, SlowerThanBase
from pytest_cudagraph.session import terminal
from pytest_cudagraph.session.context import FixtureContext
from pytest_cudagraph.session.state_keys import DEVICE_CONTEXTS, OURS, SETTINGS
from pytest_cudagraph.values import BatchReport, GraphReport, Table

BASE: pytest.StashKey[AgainstBase] = pytest.StashKey()
"""What was measured before the first test. Absent without the option."""


def pytest_configure(config: pytest.Config) -> None:
    folder = config.stash[SETTINGS].sample
    if folder is not None:
        record_base_run(config, folder)


def pytest_sessionstart(session: pytest.Session) -> None:
    settings = session.config.stash[SETTINGS]
    if (settings.base or settings.sample) and (settings.workers or session.config.getoption("dist", "no") != "no"):
        raise pytest.UsageError("--cudagraph-base measures in processes of its own, one at a time: run without -n")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Measure the selected tests in both revisions. An error there ends the run."""
    config, settings = session.config, session.config.stash[SETTINGS]
    if settings.base is None or not config.stash[OURS] or session.testsfailed:
        return
    command = Command(
        arguments=[str(argument) for argument in config.invocation_params.args],
        paths=config.option.file_or_dir,
        folder=config.invocation_params.dir.resolve(),
        root=config.rootpath.resolve(),
        has_cache=config.pluginmanager.has_plugin("cacheprovider"),
    )

    def progress(line: str) -> None:
        terminal.show(config, f"cudagraph base: {line}")

    try:
        config.stash[BASE] = compare_revisions(settings.base, command, settings.base_slowdown, progress)
    except RevisionError as error:
        raise pytest.UsageError(f"--cudagraph-base: {error}") from error
    finally:
        terminal.show(config, "")


@pytest.hookimpl(wrapper=True)
def pytest_cudagraph_judge(context: FixtureContext, report: GraphReport) -> Generator[None, GraphReport, GraphReport]:
    """Judge each batch size whose graph was timed against the base."""
    judged = yield
    base = context.stash.get(BASE, None)
    if base is None:
        return judged
    opened = context.stash[DEVICE_CONTEXTS].values()
    why = next((device.why_not_judged for device in opened if device.device == judged.device), "")
    return replace(judged, batches=tuple(_judged(batch, judged.name, base, why) for batch in judged.batches))


def _judged(batch: BatchReport, name: str, base: AgainstBase, why_not_judged: str) -> BatchReport:
    if not batch.has_entry:
        return batch
    comparison = base.find(name, batch.batch_size)
    judgement = judge_base(comparison, base.max_slowdown, why_not_judged)
    return replace(batch, base=comparison, judgements=(*batch.judgements, judgement))


def pytest_cudagraph_failures() -> Mapping[str, type[GraphTestFailure]]:
    return {"base": SlowerThanBase}


def pytest_cudagraph_tables(reports: Sequence[GraphReport]) -> list[Table]:
    return base_tables(reports)
