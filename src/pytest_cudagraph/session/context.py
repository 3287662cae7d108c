"""From pytest's request to what the pipeline needs, and from its report to the test's verdict."""

from __future__ import annotations

import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cudagraph import errors
from pytest_cudagraph.session.before_tests import judged_against_base
from pytest_cudagraph.session.exceptions import depth_of_test, exclusive_call, failure_of, hide_plugin_frames
from pytest_cudagraph.session.state_keys import CALL_LOCK, DEVICE_CONTEXTS, OUTCOMES, OWNERS, SETTINGS, marks_of
from pytest_cudagraph.settings.case import CallSettings, Case, make_case

if TYPE_CHECKING:
    from pytest_cudagraph.pipeline import CompiledModel, DeviceContext, Graphs, ModelRun
    from pytest_cudagraph.protocols import Model
    from pytest_cudagraph.settings.options import Settings
    from pytest_cudagraph.values import GraphReport

_SHOWN_EVERY_S = 0.1
"""A measurement tells its progress a thousand times a second; nobody reads more than ten."""


class FixtureContext:
    """What one test asks of the plugin: its settings, its marks, its device."""

    def __init__(self, request: pytest.FixtureRequest, resources: ExitStack | None = None) -> None:
        self._request = request
        self._resources = resources or ExitStack()
        self._config = request.config
        self._names: set[str] = set()
        self._shown_at = 0.0
        self._shows = False
        self.settings: Settings = self._config.stash[SETTINGS]
        self._marks = marks_of(request.node)

    def exclusive_call(self) -> AbstractContextManager[None]:
        """No other thread asks the plugin meanwhile."""
        return exclusive_call(self._config.stash[CALL_LOCK])

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

    def _own_entries(self, case: Case) -> None:
        """Two tests of one name would be held against, and would overwrite, each other's entries."""
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

    @hide_plugin_frames
    def tell(
        self, call: CallSettings, model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any], batch_dim: Any
    ) -> GraphReport:
        """The whole story of one model; without ``--cudagraph`` only its eager part."""
        __tracebackhide__ = True
        from pytest_cudagraph import pipeline

        case = self.case(call)
        if not self.settings.enabled:
            return pipeline.run_once(case, model, args, kwargs, batch_dim)
        with self._open_run(case, model, args, kwargs, batch_dim) as model_run:
            report = pipeline.run_stages(model_run)
        return self.conclude(report)

    @hide_plugin_frames
    def compile(
        self, call: CallSettings, model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any], batch_dim: Any
    ) -> CompiledModel:
        """Only eager and compile; what was compiled lives until teardown."""
        __tracebackhide__ = True
        from pytest_cudagraph import pipeline

        case = self.case(call)
        if not self.settings.enabled:
            pipeline.run_once(case, model, args, kwargs, batch_dim)
            return pipeline.CompiledModel(case, None, model, batch_dim)
        model_run = self._resources.enter_context(self._open_run(case, model, args, kwargs, batch_dim))
        self._run(model_run, model_run.run_eager, model_run.compile)
        return pipeline.CompiledModel(case, model_run, model, batch_dim)

    @hide_plugin_frames
    def capture(
        self,
        call: CallSettings,
        model: Model | CompiledModel,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        batch_dim: Any,
    ) -> Graphs:
        """Only eager and capture; of a compiled model what ``compile_model`` compiled. Lives until teardown."""
        __tracebackhide__ = True
        from pytest_cudagraph import pipeline

        if isinstance(model, pipeline.CompiledModel):
            return self._capture_compiled(call, model)
        case = self.case(call)
        if not self.settings.enabled:
            pipeline.run_once(case, model, args, kwargs, batch_dim)
            return pipeline.Graphs(case, None, model)
        model_run = self._resources.enter_context(self._open_run(case, model, args, kwargs, batch_dim))
        self._run(model_run, model_run.run_eager, model_run.compile, model_run.capture)
        return pipeline.Graphs(case, model_run, model)

    def _capture_compiled(self, call: CallSettings, compiled: CompiledModel) -> Graphs:
        """What was compiled, with the inputs, at the batch sizes and under the name it was compiled for."""
        __tracebackhide__ = True
        from pytest_cudagraph import pipeline

        call, case = call.checked(), compiled.case
        if call.batch_sizes is not None and sorted(call.batch_sizes) != sorted(case.batch_sizes):
            raise errors.InputError(
                f"the model was compiled for batch sizes {case.batch_sizes} and is captured at these; "
                f"found batch_sizes={call.batch_sizes}: give them to compile_model"
            )
        if call.name not in (None, case.name):
            raise errors.InputError(
                f"the model was compiled under the name {case.name!r} and is captured under it; "
                f"found name={call.name!r}: give it to compile_model"
            )
        if compiled.model_run is not None:
            self._run(compiled.model_run, compiled.model_run.capture)
        return pipeline.Graphs(compiled.case, compiled.model_run, compiled.eager)

    @hide_plugin_frames
    def check(self, graphs: Graphs, *, rtol: float | None, atol: float | None) -> Mapping[int, Any]:
        """Compare replays with eager; :class:`~pytest_cudagraph.errors.ReplayMismatch` where they differ."""
        __tracebackhide__ = True
        model_run = _run_of(graphs)
        call = CallSettings(rtol=rtol, atol=atol).checked()
        if model_run is None:
            return {}
        case = model_run.case
        model_run.case = replace(case, rtol=_or(call.rtol, case.rtol), atol=_or(call.atol, case.atol))
        self._run(model_run, model_run.check)
        return model_run.agreements

    @hide_plugin_frames
    def measure(self, graphs: Graphs, *, min_speedup: Any, max_slowdown: Any) -> GraphReport:
        """Measure and gate; graphs that nobody checked are checked first."""
        __tracebackhide__ = True
        from pytest_cudagraph import pipeline

        model_run = _run_of(graphs)
        if model_run is None:
            return pipeline.nothing_judged(graphs.case)
        call = CallSettings(
            batch_sizes=model_run.case.batch_sizes,
            name=model_run.case.name,
            min_speedup=_or(min_speedup, None if self._marks.min is not None else model_run.case.min_speedup),
            max_slowdown=max_slowdown,
        )
        told = make_case(self.nodeid, call, self._marks, self.settings)
        is_inherited = min_speedup is None and self._marks.min is None
        source = model_run.case.min_source if is_inherited else told.min_source
        model_run.case = replace(
            model_run.case, min_speedup=told.min_speedup, max_slowdown=told.max_slowdown, min_source=source
        )
        if not model_run.agreements:
            self._run(model_run, model_run.check)
        model_run.run(model_run.measure)
        return self.conclude(model_run.report())

    def _open_run(
        self, case: Case, model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any], batch_dim: Any
    ) -> ModelRun:
        __tracebackhide__ = True
        from pytest_cudagraph import pipeline

        device_context = self.device_context(case.device)
        return pipeline.ModelRun(
            case,
            device_context,
            pipeline.prepare_model(case, device_context, model, args, kwargs, batch_dim),
            cache_folder=self.cache_folder,
            compile_timeout_s=self.settings.compile_timeout,
            progress=self.progress,
        )

    def _run(self, model_run: ModelRun, *stages: Callable[[], None]) -> None:
        __tracebackhide__ = True
        for stage in stages:
            model_run.run(stage)
            if model_run.has_ended:
                self.conclude(model_run.report())

    def cache_folder(self) -> Path:
        """Where compiled packages are kept: pytest's cache; under ``-p no:cacheprovider`` a folder for this test."""
        cache = getattr(self._config, "cache", None)
        if cache is None:
            # Windows keeps a loaded library's file; nothing else may stay behind.
            folder = tempfile.TemporaryDirectory(prefix="pytest-cudagraph-", ignore_cleanup_errors=True)
            return Path(self._resources.enter_context(folder))
        return Path(cache.mkdir("cudagraph"))

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
            reporter.rewrite(line[: shutil.get_terminal_size().columns - 1], erase=True)
            if not line:
                reporter.rewrite(f"{self._begun(reporter)} ")

    def _begun(self, reporter: Any) -> str:
        return self.nodeid if reporter.verbosity > 0 else self.nodeid.partition("::")[0]

    def keep(self, report: GraphReport) -> None:
        """Keep what a story has shown, once, for the end of the run and for JUnit."""
        from pytest_cudagraph.report import properties

        outcomes = self._config.stash[OUTCOMES]
        if not any(kept is report for kept in outcomes):
            outcomes.append(report)
            self._request.node.user_properties.extend(properties(report))

    def conclude(self, report: GraphReport) -> GraphReport:
        """Keep the report, then pass, warn or raise as its verdict says."""
        __tracebackhide__ = True
        from pytest_cudagraph.report import failure_text

        report = judged_against_base(self._config, report, self.device_context())
        self.keep(report)
        if report.verdict.fails:
            raise failure_of(report, failure_text(report))
        if self.settings.strict and report.verdict.value != "passed":
            raise errors.NotProven(failure_text(report), report)
        if report.verdict.value == "inconclusive":
            warnings.warn(errors.InconclusiveWarning(failure_text(report)), stacklevel=depth_of_test())
        return report


def _run_of(graphs: Graphs) -> ModelRun | None:
    from pytest_cudagraph import pipeline

    if not isinstance(graphs, pipeline.Graphs):
        raise errors.InputError(f"this takes the graphs that capture_graphs returned; found {type(graphs).__name__}")
    return graphs.open_run() if graphs.model_run else None


def _or(given: Any, otherwise: Any) -> Any:
    return otherwise if given is None else given


def open_once(config: pytest.Config, option: str) -> DeviceContext:
    """Open a device, or give the one opened before."""
    from pytest_cudagraph.pipeline import open_device_context

    device_contexts = config.stash[DEVICE_CONTEXTS]
    if option not in device_contexts:
        device_contexts[option] = open_device_context(option, config.stash[SETTINGS])
    return device_contexts[option]
