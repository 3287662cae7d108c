"""From pytest's request to what the pipeline needs, and from its report to the test's verdict."""

from __future__ import annotations

import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cudagraph import errors
from pytest_cudagraph.foreign import printable
from pytest_cudagraph.session.devices import open_once
from pytest_cudagraph.session.exceptions import depth_of_test, exclusive_call, hide_plugin_frames, outcome_of
from pytest_cudagraph.session.hooks import load_hooks
from pytest_cudagraph.session.state_keys import ADDITIONS, CALL_LOCK, OUTCOMES, OWNERS, SETTINGS, marks_of
from pytest_cudagraph.settings.case import CallSettings, Case, ModelCall, make_case
from pytest_cudagraph.settings.other_plugins import audit_rules
from pytest_cudagraph.values import Addition, Table

if TYPE_CHECKING:
    from pytest_cudagraph.pipeline import DeviceContext, Graphs, ModelRun
    from pytest_cudagraph.settings.options import Settings
    from pytest_cudagraph.values import GraphReport

_SHOWN_EVERY_S = 0.1
"""A measurement reports progress a thousand times a second."""


class FixtureContext:
    """What the fixtures of one test share: its settings, its marks, its device."""

    def __init__(self, request: pytest.FixtureRequest, resources: ExitStack | None = None) -> None:
        load_hooks(request.config)
        self._request = request
        self._resources = resources or ExitStack()
        self._config = request.config
        self._names: set[str] = set()
        self._shown_at = 0.0
        self._shows = False
        self.stash = self._config.stash
        self.settings: Settings = self.stash[SETTINGS]
        self._marks = marks_of(request.node)

    def exclusive_call(self) -> AbstractContextManager[None]:
        """Hold the lock of the plugin's calls."""
        return exclusive_call(self._config.stash[CALL_LOCK])

    @property
    def context(self) -> FixtureContext:
        """Itself, as of what a fixture gives to a test."""
        return self

    @property
    def hook(self) -> Any:
        """The hooks of other plugins."""
        return self._config.hook

    @property
    def nodeid(self) -> str:
        return str(self._request.node.nodeid)

    def case(self, call: CallSettings) -> Case:
        """Resolve one call; a name may be measured once per test."""
        from pytest_cudagraph.baseline import normal_name

        named = replace(call, name=normal_name(self.nodeid, call.name))
        case = make_case(self.nodeid, named, self._marks, self.settings)
        if case.name in self._names:
            raise errors.InputError(
                f"name {case.name!r} was measured already in this test; give each call its own with name=..."
            )
        self._names.add(case.name)
        self._own_entries(case)
        return case

    def resolve(self, call: CallSettings) -> Case:
        """The settings of a call that has no entry of its own."""
        return make_case(self.nodeid, call, self._marks, self.settings)

    def _own_entries(self, case: Case) -> None:
        """Refuse two tests of one name: each would be compared with the other's entry and overwrite it."""
        owners = self._config.stash[OWNERS]
        for size in case.batch_sizes:
            owner = owners.setdefault((case.device, case.name, size), self.nodeid)
            if owner != self.nodeid:
                raise errors.InputError(
                    f"an entry of a baseline is of one test; {self.nodeid} and {owner} both measure "
                    f"name {case.name!r}, batch {size}: give each its own with name=..."
                )

    @hide_plugin_frames
    def device_context(self, device: str | None = None) -> DeviceContext:
        """The device of this test, opened once per session."""
        return open_once(self._config, device or self._marks.device or self.settings.device)

    def start(self, call: ModelCall) -> tuple[Case, ModelRun | None]:
        """A run that lives until teardown. Without ``--cudagraph`` the model is called once, and there is no run."""
        __tracebackhide__ = True
        from pytest_cudagraph import pipeline

        case = self.case(call.settings)
        if not self.settings.enabled:
            pipeline.run_once(call, case)
            return case, None
        return case, self._resources.enter_context(self.open_run(call, case))

    def open_run(self, call: ModelCall, case: Case) -> ModelRun:
        """The stages of a model on the device of its case."""
        __tracebackhide__ = True
        from pytest_cudagraph import pipeline

        device_context = self.device_context(case.device)
        return pipeline.ModelRun(
            case=case,
            device_context=device_context,
            model=pipeline.prepare_model(call, case, device_context.backend),
            cache_folder=self.cache_folder,
            compile_timeout_s=self.settings.compile_timeout,
            progress=self.progress,
            audit_rules=audit_rules(self._config),
        )

    def run_stages(self, model_run: ModelRun, *stages: Callable[[], None]) -> None:
        """Run some stages. The first that fails ends the test."""
        __tracebackhide__ = True
        for stage in stages:
            model_run.run(stage)
            if model_run.has_failed:
                self.conclude(model_run.finish())

    def cache_folder(self) -> Path:
        """Where compiled packages are kept: pytest's cache; under ``-p no:cacheprovider`` a folder for this test."""
        cache = getattr(self._config, "cache", None)
        if cache is None:
            folder = tempfile.TemporaryDirectory(prefix="pytest-cudagraph-", ignore_cleanup_errors=True)
            return Path(self._resources.enter_context(folder))
        try:
            return Path(cache.mkdir("cudagraph"))
        except OSError as error:
            raise errors.CudagraphError(
                f"compile='aot' keeps packages in pytest's cache, which cannot be written: {error.strerror}: "
                f"{error.filename}\n  to fix: -o cache_dir=FOLDER with one that can be written, or -p no:cacheprovider"
            ) from error

    def progress(self, line: str) -> None:
        """Show one line on a terminal, over the last one; nothing on a pipe. An empty line clears it."""
        now = time.monotonic()
        if now - self._shown_at < _SHOWN_EVERY_S if line else not self._shows:
            return
        self._shown_at, self._shows = now, bool(line)
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        capture: Any = self._config.pluginmanager.get_plugin("capturemanager")
        if reporter is None or not reporter.isatty or capture is None:
            return
        with capture.global_and_fixture_disabled():
            # A line that wraps could not be written over.
            reporter.rewrite(printable(line)[: shutil.get_terminal_size().columns - 1], erase=True)
            if not line:
                reporter.rewrite(f"{self._begun(reporter)} ")

    def _begun(self, reporter: Any) -> str:
        return self.nodeid if reporter.verbosity > 0 else self.nodeid.partition("::")[0]

    def keep(self, report: GraphReport) -> None:
        """Keep a report, once, for the end of the run and for JUnit."""
        from pytest_cudagraph.report import properties

        outcomes = self._config.stash[OUTCOMES]
        if not any(kept is report for kept in outcomes):
            outcomes.append(report)
            self._request.node.user_properties.extend(properties(report))

    def add(self, key: str, entry: Mapping[str, Any], lines: Sequence[str] = (), tables: Sequence[Table] = ()) -> None:
        """Add to the list ``key`` of the document, to the summary and to the tables of the run.

        What this test adds is dropped if it reruns.
        """
        addition = Addition(nodeid=self.nodeid, key=key, entry=entry, lines=tuple(lines), tables=tuple(tables))
        self.stash[ADDITIONS].append(addition)

    def methods(self) -> Mapping[str, Callable[..., Any]]:
        """The methods of the fixture ``cudagraph`` that features add, by name."""
        added = self._config.hook.pytest_cudagraph_methods(config=self._config)
        return {name: method for methods in added for name, method in methods.items()}

    def conclude(self, report: GraphReport) -> GraphReport:
        """Let features judge the report, keep it, then pass, warn or raise as its verdict says."""
        __tracebackhide__ = True
        judged: GraphReport = self.hook.pytest_cudagraph_judge(context=self, report=report)
        self.keep(judged)
        self.end_with(judged)
        return judged

    def end_with(self, report: GraphReport) -> None:
        """Pass, warn or raise as the verdict of a report says."""
        __tracebackhide__ = True
        added = self._config.hook.pytest_cudagraph_failures(config=self._config)
        outcome = outcome_of(report, is_strict=self.settings.strict, added=added)
        if isinstance(outcome, Warning):
            warnings.warn(outcome, stacklevel=depth_of_test())
        elif outcome is not None:
            raise outcome


def run_of(graphs: Graphs) -> ModelRun | None:
    """The run that captured these graphs. None without ``--cudagraph``. Raises InputError for anything else."""
    __tracebackhide__ = True
    from pytest_cudagraph import pipeline

    if not isinstance(graphs, pipeline.Graphs):
        raise errors.InputError(f"this takes the graphs that capture_graphs returned; found {type(graphs).__name__}")
    return graphs.open_run() if graphs.model_run else None
