"""The fixtures ``tune`` and ``perf_monitor``: the tuner on the run's device, and the calls of a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_cudagraph.monitor import PerfMonitor
from pytest_cudagraph.serving.calls import CallMonitor
from pytest_cudagraph.session.context import FixtureContext
from pytest_cudagraph.session.exceptions import hide_plugin_frames
from pytest_cudagraph.settings.case import CallSettings, ModelCall
from pytest_cudagraph.units import latency_text, to_ns
from pytest_cudagraph.values import Column, Table

if TYPE_CHECKING:
    from pytest_cudagraph.protocols import Clock
    from pytest_cudagraph.serving.tuning import TuningReport
    from pytest_cudagraph.values import CompileMode


class Tune:
    """The ``tune`` fixture."""

    def __init__(self, context: FixtureContext) -> None:
        self._context = context

    def __call__(
        self,
        model: Any,
        *example_inputs: Any,
        kwargs: Mapping[str, Any] | None = None,
        batch_sizes: Sequence[int] | None = None,
        batch_dim: Any = 0,
        compile: Sequence[CompileMode] = ("none",),
        graph: Sequence[bool] = (True, False),
        objective: Any = "throughput",
        constraint: Any = None,
        tolerance: float = 0.02,
        name: str | None = None,
    ) -> TuningReport:
        """Find the best combination of batch size, compile mode and graph, as :func:`pytest_cudagraph.tune`.

        Batch sizes and time budget come from marker and settings if they are not given. Without ``--cudagraph`` the
        model has run once per batch size, and the report has no combinations.
        """
        __tracebackhide__ = True
        call = ModelCall(
            model=model, args=example_inputs, kwargs={} if kwargs is None else kwargs, batch_dim=batch_dim,
            settings=CallSettings(batch_sizes=batch_sizes),
        )  # fmt: skip
        options = {
            "compile": compile, "graph": graph, "objective": objective, "constraint": constraint,
            "tolerance": tolerance, "name": name or self._context.nodeid,
        }  # fmt: skip
        return _tune(self._context, call, options)


@hide_plugin_frames
def _tune(context: FixtureContext, call: ModelCall, options: dict[str, Any]) -> TuningReport:
    __tracebackhide__ = True
    from pytest_cudagraph import pipeline
    from pytest_cudagraph.serving import tuning

    case = context.resolve(call.settings)
    if not context.settings.enabled:
        pipeline.run_once(call, case)
        return tuning.TuningReport(
            name=options["name"], device=None, objective=str(options["objective"]), tolerance=options["tolerance"],
            combinations=(), best=None, is_best_decided=False,
        )  # fmt: skip
    device_context = context.device_context(case.device)
    prepared = pipeline.prepare_model(call, case, device_context.backend)
    with device_context.using_its_threads():
        report = tuning.tune_examples(
            prepared.eager, prepared.examples, device_context.backend,
            time_budget_s=case.time_budget * len(case.batch_sizes),
            cache_dir=context.cache_folder() if "aot" in options["compile"] else None,
            compile_timeout_s=context.settings.compile_timeout, progress=context.progress, **options,
        )  # fmt: skip
    why_not = device_context.why_not_judged
    return replace(report, notes=(*report.notes, f"speed is not judged here: {why_not}")) if why_not else report


def tune_after(context: FixtureContext, call: ModelCall, name: str) -> None:
    """Tune a model whose call has passed, for ``--cudagraph-tune``. An error is a line of the summary."""
    from pytest_cudagraph.serving.drop_in_statistics import cause_of

    modes = dict.fromkeys(("none", context.resolve(call.settings).compile))
    try:
        report = _tune(context, call, {**_DEFAULTS, "compile": list(modes), "name": name})
    # The test has passed, whatever the tuner meets.
    except Exception as error:
        entry, lines = {"name": name}, [f"tuned: {name}: nothing, for {cause_of(error)}"]
    else:
        entry, lines = report.document(), _lines(report)
    context.add("tuned", {**entry, "lines": lines}, lines, [_tuned_table(context.nodeid, lines)])


def _tuned_table(test: str, lines: Sequence[str]) -> Table:
    """For the page. The terminal has the lines."""
    columns = (Column(title="", right=False), Column(title="result", right=False))
    return Table(title="tuned", columns=columns, rows=((test, "\n".join(lines)),), in_terminal=False)


_DEFAULTS = {"graph": (True, False), "objective": "throughput", "constraint": None, "tolerance": 0.02}


def _lines(report: TuningReport) -> list[str]:
    """The best combination, and how to use it."""
    if report.best is None:
        disturbed = "the device was disturbed in the race between the batch sizes"
        return [f"tuned: {report.name}: nothing, for {disturbed if report.best_of else report.combinations[0].reason}"]
    certain = "" if report.is_best_decided else ", not proven"
    usage = report.usage() or ["no graph is the best at any batch size"]
    return [f"tuned: {report.name}: best is {report.best.combination}{certain}", *(f"  {line}" for line in usage)]


class MonitorOfTest:
    """The ``perf_monitor`` fixture: a :class:`~pytest_cudagraph.CallMonitor` of this test, and the card of a block."""

    def __init__(self) -> None:
        self.calls = CallMonitor()
        self.watch, self.measure = self.calls.watch, self.calls.measure
        self.summary, self.expect = self.calls.summary, self.calls.expect

    def __call__(self, *, every_s: float | None = None, clock: Clock | None = None) -> PerfMonitor:
        """A context manager that watches host and GPU while its block runs. Its ``card`` says what it saw."""
        __tracebackhide__ = True
        return PerfMonitor(every_s=every_s, clock=clock)

    def keep(self, context: FixtureContext) -> None:
        """Keep what was recorded for the JSON document."""
        for entry in self.calls.entries():
            context.add("calls", entry, tables=[_calls_table(context.nodeid, entry)])


_CALLS = ("", "name", "calls", "failures", "p50", "p90", "p99", "tokens/s", "by graph")


def _calls_table(test: str, entry: Mapping[str, Any]) -> Table:
    """One name of recorded calls, for the page."""
    durations = [entry["duration_seconds"][key] for key in ("p50", "p90", "p99")]
    tokens, hits = entry["tokens_per_second"], entry["graph_hit_ratio"]
    row = (
        test,
        entry["name"],
        str(entry["calls"]),
        str(sum(entry["failures"].values())),
        *("-" if each is None else latency_text(to_ns(each)) for each in durations),
        "-" if tokens is None else f"{tokens:.0f}",
        "-" if hits is None else f"{hits:.0%}",
    )
    columns = tuple(Column(title=title, right=title not in ("", "name")) for title in _CALLS)
    return Table(title="monitored calls", columns=columns, rows=(row,), in_terminal=False)
