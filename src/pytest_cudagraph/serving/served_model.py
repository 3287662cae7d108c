"""One model of the drop-in compiler: a graph serves a call, else compiled code, else the model itself."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from pytest_cudagraph.backends.capture_mode import is_capturing
from pytest_cudagraph.child_process import begin_in_forked_child
from pytest_cudagraph.compile import Compiled
from pytest_cudagraph.errors import CudagraphError
from pytest_cudagraph.model_watch import weak_alias
from pytest_cudagraph.pipeline.stages import Stages
from pytest_cudagraph.protocols import Backend, Model
from pytest_cudagraph.serving.compiled_code import CheckedBackend, CompiledCode, compile_and_check
from pytest_cudagraph.serving.drop_in_statistics import (
    DegradeReason,
    EventLog,
    InferenceResult,
    ModelStatistics,
    cause_of,
)
from pytest_cudagraph.serving.graph_runner import GraphRunner, open_backend_for, renew_lock
from pytest_cudagraph.serving.request import CompilerOptions, Request
from pytest_cudagraph.serving.statistics import NoGraphReason, RunnerStatistics

_CHANGED = (
    "the model has changed; its calls and graphs use eager code now\n"
    "  to compile it again: call compile_model_aot with the same arguments"
)

_AS_GIVEN = 0
"""The place of the user's own example among the examples by batch size: it may have any size."""


class ReplayOnlyRunner(GraphRunner):
    """Returns the :class:`NoGraphReason` of a call that no graph serves, and does not run the model."""

    def _eager(self, reason: NoGraphReason, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._tally.eager[reason] += 1
        return reason


class ServedModel:
    """Serves the calls of one model from any number of threads, and does not keep the model alive.

    No optimisation raises here. Exceptions of the model pass through unchanged.
    """

    def __init__(self, model: Model, request: Request, options: CompilerOptions) -> None:
        self.request = request
        self._options = options
        self._contents: Model | None = weak_alias(model)
        self._lock = threading.RLock()
        begin_in_forked_child(self, renew_lock)
        self._events = EventLog(request.name)
        self._backend: Backend | None = None
        self._code: CompiledCode | None = None
        self._dropped_code: CompiledCode | None = None
        self._has_lost_code = False
        self._compile_ns = 0
        self._runner: ReplayOnlyRunner | None = None
        self._last_graphs: RunnerStatistics | None = None

    @property
    def can_be_renewed(self) -> bool:
        """Whether compiled code was dropped because the model changed, so that a new build would help."""
        return self._has_lost_code

    def build(self, folder: Callable[[], Path]) -> None:
        """Compile, capture and check as far as possible. Raises only what the model raises on its example inputs."""
        own_error: Exception | None = None
        with self._lock:
            self._release()
            self._has_lost_code = False
            try:
                stages = self._stages()
                own_error = stages.eager_error(_AS_GIVEN)
                if own_error is None:
                    self._optimise(stages, folder)
            # An optimisation may raise anything; eager remains.
            except Exception as error:
                self._events.add(DegradeReason.NOT_CAPTURED, error)
        if own_error is not None:
            raise own_error

    def serve(self, model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> InferenceResult:
        """The output of ``model``, which is this model, in inference mode.

        A call within a capture runs the model itself and is not counted.
        """
        if is_capturing():
            with torch.inference_mode():
                output = model(*args, **kwargs)
            return InferenceResult(output=output, path="eager", reason=NoGraphReason.CAPTURING.value)
        with self._lock:
            if self._runner:
                result = self._through_graphs(self._runner, model, args, kwargs)
            else:
                result = self._without_graph(model, args, kwargs, self._why_no_runner())
            self._events.count(result.path, result.reason)
            return result

    def statistics(self) -> ModelStatistics:
        """All calls until now; also after :meth:`close`."""
        with self._lock:
            graphs = self._runner.statistics if self._runner else self._last_graphs
            return ModelStatistics(
                name=self.request.name,
                mode=self.request.mode,
                compile_mode=self.request.compile_mode,
                device=self._backend.device if self._backend else "",
                paths=dict(self._events.paths),
                reasons=dict(self._events.reasons),
                padded=graphs.padded if graphs else 0,
                compiled_sizes=self._code.sizes if self._code else (),
                compile_ns=self._compile_ns,
                capture_ns=graphs.capture_ns if graphs else 0,
                memory_bytes=dict(graphs.memory_bytes) if graphs else {},
                notes=self._events.notes,
            )

    def close(self) -> None:
        """Release graphs, compiled code and the model's contents; later calls run eager."""
        with self._lock:
            self._release()
            self._contents = None

    def _stages(self) -> Stages:
        if self._contents is None:
            raise CudagraphError("the compiler has been cleaned up")
        example = self.request.example
        self._backend = open_backend_for(self._options.device_for(example), example)
        return Stages(model=self._contents, examples={_AS_GIVEN: example}, backend=self._backend)

    def _optimise(self, stages: Stages, folder: Callable[[], Path]) -> None:
        options, example = self._options, self.request.example
        if self.request.compile_mode != "none":
            self._code = self._compiled(stages, folder)
        if options.graphs:
            self._runner = ReplayOnlyRunner(
                stages.model,
                *example.args,
                kwargs=example.kwargs,
                batch_sizes=options.batch_sizes,
                batch_dim=self.request.batch_dim,
                max_graphs=options.max_graphs,
                backend=CheckedBackend(stages.backend, self._compiled_for, self._accept_weights),
            )
            self._note_limits(self._runner.statistics)

    def _compiled(self, stages: Stages, folder: Callable[[], Path]) -> CompiledCode | None:
        started_ns = time.perf_counter_ns()
        on_difference = functools.partial(self._events.add, DegradeReason.CODE_DIFFERS)
        try:
            return compile_and_check(stages, self.request, self._options, folder, on_difference)
        # A compile may raise anything (no compiler, no time, a full disk); graphs do not need it.
        except Exception as error:
            self._events.add(DegradeReason.NOT_COMPILED, error)
            return None
        finally:
            self._compile_ns += time.perf_counter_ns() - started_ns

    def _through_graphs(
        self, runner: ReplayOnlyRunner, model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> InferenceResult:
        try:
            if self._code is not None and self._code.has_old_weights():
                self._drop_code()
                runner.recapture()
            output = runner(*args, **kwargs)
        # Graphs may raise anything; the model can still serve the call.
        except Exception as error:
            self._events.add(DegradeReason.NOT_SERVED, error)
            with self._running():
                output = model(*args, **kwargs)
            return InferenceResult(output=output, path="eager", reason=NoGraphReason.RAISED.value)
        if isinstance(output, NoGraphReason):
            result = self._without_graph(model, args, kwargs, output)
            self._note_limits(runner.statistics)
            return result
        if self._dropped_code is not None:  # after a replay, no graph reads the dropped code
            self._dropped_code.close()
            self._dropped_code = None
        return InferenceResult(output=output, path="graph")

    def _without_graph(
        self, model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any], reason: NoGraphReason
    ) -> InferenceResult:
        """Serve a call from compiled code of its form, else from the model."""
        code = self._current_code()
        call = code.call_matching(args, kwargs) if code else None
        failure: Exception | None = None
        with self._running():
            if call is not None:
                try:
                    return InferenceResult(output=call(*args, **kwargs), path="compiled", reason=reason.value)
                # Compiled code may raise anything; the model decides whether the call is valid.
                except Exception as error:
                    failure = error
            output = model(*args, **kwargs)
        if code is not None and failure is not None:
            code.stop_serving()  # graphs captured from it were checked, and stay
            self._events.add(DegradeReason.CODE_DIFFERS, f"it raised where the model does not: {cause_of(failure)}")
        return InferenceResult(output=output, path="eager", reason=reason.value)

    def _why_no_runner(self) -> NoGraphReason:
        if self._contents is None:
            return NoGraphReason.CLEANED_UP
        return NoGraphReason.NO_GRAPHS if self._options.graphs else NoGraphReason.GRAPHS_OFF

    def _running(self) -> AbstractContextManager[Any]:
        return self._backend.running() if self._backend else torch.inference_mode()

    def _compiled_for(self, size: int) -> Compiled | None:
        code = self._current_code()
        return code.at(size) if code else None

    def _accept_weights(self) -> None:
        if self._code is not None:
            self._code.accept_weights()

    def _current_code(self) -> CompiledCode | None:
        if self._code is not None and self._code.is_outdated():
            self._drop_code()
        return self._code

    def _drop_code(self) -> None:
        """Stop using the code. It is released later, because graphs may read from it until they are dropped."""
        self._events.add(DegradeReason.CODE_DROPPED, _CHANGED)
        self._has_lost_code = True
        self._dropped_code, self._code = self._code, None

    def _note_limits(self, graphs: RunnerStatistics) -> None:
        for size, why in graphs.refused.items():
            self._events.add(DegradeReason.NOT_CAPTURED, f"batch {size}: {why}")
        if graphs.not_padded:
            self._events.add(DegradeReason.NOT_PADDED, graphs.not_padded)

    def _release(self) -> None:
        runner, self._runner = self._runner, None
        held = [code for code in (self._code, self._dropped_code) if code is not None]
        self._code = self._dropped_code = None
        try:
            if runner is not None:
                runner.close()
                self._last_graphs = runner.statistics
        finally:
            for code in held:
                code.close()
