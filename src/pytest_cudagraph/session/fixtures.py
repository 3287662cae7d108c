"""The fixtures and the callables they give to a test. Torch is imported only when a fixture is called."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from pytest_cudagraph.errors import InputError
from pytest_cudagraph.foreign import value_text
from pytest_cudagraph.session.context import FixtureContext, run_of
from pytest_cudagraph.session.exceptions import hide_plugin_frames
from pytest_cudagraph.settings.case import CallSettings, ModelCall

if TYPE_CHECKING:
    from pytest_cudagraph.pipeline import CompiledModel, Graphs
    from pytest_cudagraph.values import Agreement, CompileMode, GraphReport

_T = TypeVar("_T")


def _refuse(unknown: Mapping[str, Any], fixture: str, call: Callable[..., Any]) -> None:
    """Explain an unknown argument: of the model, or misspelt. Python's own error does not say which."""
    __tracebackhide__ = True
    if not unknown:
        return
    takes = [each.name for each in inspect.signature(call).parameters.values() if each.kind is each.KEYWORD_ONLY]
    # Values are shown only where they are short: a tensor fills a screen.
    shown = {name: value_text(value) if type(value) in (bool, int, float) else "..." for name, value in unknown.items()}
    found = ", ".join(f"{name}={text}" for name, text in shown.items())
    given = ", ".join(f"{name!r}: {text}" for name, text in shown.items())
    near = [match for name in unknown for match in difflib.get_close_matches(name, takes, n=1, cutoff=0.75)]
    misspelt = f"; nearest of its own: {', '.join(near)}" if near else ""
    raise InputError(
        f"{fixture} takes {', '.join(takes)}; found {found}: "
        f"what the model takes goes into kwargs={{{given}}}{misspelt}"
    )


def _call(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, batch_dim: Any, settings: CallSettings
) -> ModelCall:
    settings = replace(settings, has_rows=batch_dim is not None and (bool(args) or kwargs is not None))
    return ModelCall(
        model=model, args=args, kwargs={} if kwargs is None else kwargs, batch_dim=batch_dim, settings=settings
    )


class Cudagraph:
    """The ``cudagraph`` fixture: call it with a model and example inputs to run all stages."""

    def __init__(self, context: FixtureContext) -> None:
        self.context = context

    @property
    def device(self) -> str:
        """The torch device the test runs on (``cuda:0`` or ``cpu``), to create models and inputs there."""
        return self.context.device_context().backend.device

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A method that a feature adds, such as ``own``."""
        methods = self.context.methods()
        if name not in methods:
            raise AttributeError(f"cudagraph has no attribute {name!r}; features add {', '.join(sorted(methods))}")
        return functools.partial(methods[name], self.context)

    @hide_plugin_frames
    def __call__(
        self,
        /,
        model: Callable[..., Any],
        *example_inputs: Any,
        kwargs: Mapping[str, Any] | None = None,
        batch_sizes: Sequence[int] | None = None,
        batch_dim: Any = 0,
        compile: CompileMode | None = None,
        min_speedup: float | Mapping[int, float] | None = None,
        max_slowdown: float | None = None,
        rtol: float | None = None,
        atol: float | None = None,
        draw: Callable[[Any], Any] | Sequence[Any] | None = None,
        reset: Callable[[], object] | None = None,
        name: str | None = None,
        **unknown: Any,
    ) -> GraphReport:
        """Audit, compile, capture, check, measure, gate. The baseline is written at the end of the session.

        ``example_inputs`` and ``kwargs`` are pytrees of tensors and plain values; the batch dimension (``batch_dim``,
        an int or a pytree of ints and None) of every tensor that has the example's batch size there is resized. With
        ``batch_dim=None`` the example runs as it is, at one batch size. The other arguments override marker and
        settings: ``min_speedup`` is a ratio or ``{batch size: ratio}``, ``max_slowdown`` a fraction from 0 to 1, or
        infinity for no limit, ``rtol`` and ``atol`` as in ``torch.testing.assert_close``. ``draw`` gives new inputs of
        the example's form, for audit and check: a function of a ``torch.Generator``, or several examples, each the
        positional arguments, or ``(positional, keywords)``. ``reset`` brings the state back
        in place before each measured call (``lambda: position.fill_(n)``), where a copy of it takes long, as of a large
        cache. It is tried out once. ``name`` is the key of the baseline entry, by default the test's node id;
        two calls need two names, also in two tests.

        Without ``--cudagraph`` the model has run once per batch size and the report says that nothing was judged.
        Raises a subclass of :class:`~pytest_cudagraph.errors.GraphTestFailure` with the report in ``report``, and
        :class:`~pytest_cudagraph.errors.InputError` for inputs or outputs that cannot be used.
        """
        __tracebackhide__ = True
        _refuse(unknown, "cudagraph", self.__call__)
        gates: dict[str, Any] = {"min_speedup": min_speedup, "max_slowdown": max_slowdown, "rtol": rtol, "atol": atol}
        settings = CallSettings(batch_sizes=batch_sizes, compile=compile, name=name, **gates)
        call = replace(_call(model, example_inputs, kwargs, batch_dim, settings), draw=draw, reset=reset)
        return self._run(call)

    def _run(self, call: ModelCall) -> GraphReport:
        __tracebackhide__ = True
        from pytest_cudagraph import pipeline

        context = self.context
        case = context.case(call.settings)
        if not context.settings.enabled:
            return pipeline.run_once(call, case)
        with context.open_run(call, case) as model_run:
            report = context.conclude(pipeline.run_stages(model_run))
        context.hook.pytest_cudagraph_model_passed(context=context, call=call, report=report)
        return report


class CompileModel:
    """The ``compile_model`` fixture."""

    def __init__(self, context: FixtureContext) -> None:
        self.context = context

    @hide_plugin_frames
    def __call__(
        self,
        /,
        model: Callable[..., Any],
        *example_inputs: Any,
        kwargs: Mapping[str, Any] | None = None,
        mode: CompileMode | None = None,
        batch_sizes: Sequence[int] | None = None,
        batch_dim: Any = 0,
        name: str | None = None,
        **unknown: Any,
    ) -> CompiledModel:
        """Compile a model for every batch size by ``mode`` (``inductor`` or ``aot``; by default the setting's).

        ``name`` is the key of the baseline entry, by default the test's node id; two calls in a test need two names.
        Without ``--cudagraph`` what is returned calls the model itself. Raises
        :class:`~pytest_cudagraph.errors.CompileFailed`.
        """
        __tracebackhide__ = True
        _refuse(unknown, "compile_model", self.__call__)
        settings = CallSettings(batch_sizes=batch_sizes, compile=mode, name=name, compile_argument="mode")
        from pytest_cudagraph import pipeline

        call = _call(model, example_inputs, kwargs, batch_dim, settings)
        case, model_run = self.context.start(call)
        if model_run is not None:
            self.context.run_stages(model_run, model_run.run_eager, model_run.compile)
        return pipeline.CompiledModel(case, model_run, call.model, call.batch_dim)


class CaptureGraphs:
    """The ``capture_graphs`` fixture."""

    def __init__(self, context: FixtureContext) -> None:
        self.context = context

    @hide_plugin_frames
    def __call__(
        self,
        /,
        model: Callable[..., Any] | CompiledModel,
        *example_inputs: Any,
        kwargs: Mapping[str, Any] | None = None,
        batch_sizes: Sequence[int] | None = None,
        batch_dim: Any = 0,
        name: str | None = None,
        **unknown: Any,
    ) -> Graphs:
        """Capture one graph per batch size; of a compiled model, what was compiled, with its inputs, sizes and name.

        Without ``--cudagraph`` the graphs are the eager model. Raises
        :class:`~pytest_cudagraph.errors.CaptureFailed`, and :class:`~pytest_cudagraph.errors.InputError` for sizes or
        a name that the model was not compiled for.
        """
        __tracebackhide__ = True
        _refuse(unknown, "capture_graphs", self.__call__)
        from pytest_cudagraph import pipeline

        settings = CallSettings(batch_sizes=batch_sizes, name=name)
        if isinstance(model, pipeline.CompiledModel):
            return self._of_compiled(settings.checked(), model)
        call = _call(model, example_inputs, kwargs, batch_dim, settings)
        case, model_run = self.context.start(call)
        if model_run is not None:
            self.context.run_stages(model_run, model_run.run_eager, model_run.compile, model_run.capture)
        return pipeline.Graphs(case, model_run, call.model)

    def _of_compiled(self, call: CallSettings, compiled: CompiledModel) -> Graphs:
        """Capture what was compiled, with the inputs, batch sizes and name that it was compiled for."""
        __tracebackhide__ = True
        from pytest_cudagraph import pipeline

        case = compiled.case
        if call.batch_sizes is not None and sorted(call.batch_sizes) != sorted(case.batch_sizes):
            raise InputError(
                f"the model was compiled for batch sizes {case.batch_sizes} and is captured at these; "
                f"found batch_sizes={call.batch_sizes}: give them to compile_model"
            )
        if call.name not in (None, case.name):
            raise InputError(
                f"the model was compiled under the name {case.name!r} and is captured under it; "
                f"found name={call.name!r}: give it to compile_model"
            )
        if compiled.model_run is not None:
            self.context.run_stages(compiled.model_run, compiled.model_run.capture)
        return pipeline.Graphs(case, compiled.model_run, compiled.eager)


class AssertReplayClose:
    """The ``assert_replay_close`` fixture."""

    def __init__(self, context: FixtureContext) -> None:
        self.context = context

    @hide_plugin_frames
    def __call__(
        self,
        graphs: Graphs,
        *,
        rtol: float | None = None,
        atol: float | None = None,
        draw: Callable[[Any], Any] | Sequence[Any] | None = None,
    ) -> Mapping[int, Agreement]:
        """Prove replays against eager on fresh inputs; empty without ``--cudagraph``.

        ``draw`` gives these inputs, as for ``cudagraph``. Raises :class:`~pytest_cudagraph.errors.ReplayMismatch`.
        """
        __tracebackhide__ = True
        model_run = run_of(graphs)
        call = CallSettings(rtol=rtol, atol=atol).checked()
        if model_run is None:
            return {}
        model_run = model_run.with_tolerance(call.rtol, call.atol, draw)
        self.context.run_stages(model_run, model_run.check)
        # Of a difference the test has ended.
        agreements: Any = model_run.results.agreements
        return dict(agreements)


class MeasureSpeedup:
    """The ``measure_speedup`` fixture."""

    def __init__(self, context: FixtureContext) -> None:
        self.context = context

    @hide_plugin_frames
    def __call__(
        self,
        graphs: Graphs,
        *,
        min_speedup: float | Mapping[int, float] | None = None,
        max_slowdown: float | None = None,
        reset: Callable[[], object] | None = None,
    ) -> GraphReport:
        """Measure the graphs against eager and gate them; graphs that nobody checked are checked first.

        ``reset`` is that of :meth:`Cudagraph.__call__`. Raises
        :class:`~pytest_cudagraph.errors.GraphTestFailure` by the gate that is missed.
        """
        __tracebackhide__ = True
        from pytest_cudagraph import pipeline

        model_run = run_of(graphs)
        if model_run is None:
            return pipeline.nothing_judged(graphs.case)
        case = model_run.case
        gates: dict[str, Any] = {"min_speedup": min_speedup, "max_slowdown": max_slowdown}
        asked = self.context.resolve(CallSettings(batch_sizes=case.batch_sizes, name=case.name, **gates))
        model_run = model_run.with_gates(asked, reset)
        if not model_run.results.agreements:
            self.context.run_stages(model_run, model_run.check)
        model_run.run(model_run.measure)
        return self.context.conclude(model_run.finish())


def open_fixture(request: pytest.FixtureRequest, make: Callable[[FixtureContext], _T]) -> Iterator[_T]:
    """What a fixture gives to its test. All that it holds is released at teardown."""
    with ExitStack() as resources:
        yield make(FixtureContext(request, resources))
