"""The fixture ``tune``: the tuner on the device, with the settings and the threads of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cudagraph.session.context import FixtureContext
from pytest_cudagraph.session.exceptions import hide_plugin_frames
from pytest_cudagraph.session.state_keys import TUNED
from pytest_cudagraph.settings.case import CallSettings, ModelCall

if TYPE_CHECKING:
    from pytest_cudagraph.tuning import TuningReport
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
        """Find the best combination of batch size, compile mode and graph, as :func:`pytest_cudagraph.tuning.tune`.

        Batch sizes and time budget come from marker and settings if they are not given. Without ``--cudagraph`` the
        model has run once per batch size, and the report has no cells.
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
    from pytest_cudagraph import pipeline, tuning

    case = context.resolve(call.settings)
    if not context.settings.enabled:
        pipeline.run_once(call, case)
        return tuning.TuningReport(
            name=options["name"], device=None, objective=str(options["objective"]), tolerance=options["tolerance"],
            cells=(), best=None, is_best_decided=False,
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
    kept = context.stash[TUNED]
    try:
        found = _tune(context, call, {**_DEFAULTS, "compile": list(modes), "name": name})
    # The test has passed, whatever the tuner meets.
    except Exception as error:
        kept.append(
            {"nodeid": context.nodeid, "name": name, "lines": [f"tuned: {name}: nothing, for {cause_of(error)}"]}
        )
    else:
        kept.append({"nodeid": context.nodeid, **found.document(), "lines": _lines(found)})


_DEFAULTS = {"graph": (True, False), "objective": "throughput", "constraint": None, "tolerance": 0.02}


def _lines(found: TuningReport) -> list[str]:
    """The best cell, and how to use it."""
    if found.best is None:
        disturbed = "the device was disturbed in the race between the batch sizes"
        return [f"tuned: {found.name}: nothing, for {disturbed if found.best_of else found.cells[0].reason}"]
    certain = "" if found.is_best_decided else ", not proven"
    usage = found.usage() or ["no graph is the best at any batch size"]
    return [f"tuned: {found.name}: best is {found.best.cell}{certain}", *(f"  {each}" for each in usage)]


@pytest.fixture
def tune(request: pytest.FixtureRequest) -> Iterator[Tune]:
    """Measure a grid of batch sizes, compile modes and graphs, and find the best cell that is correct."""
    with ExitStack() as resources:
        yield Tune(FixtureContext(request, resources))
