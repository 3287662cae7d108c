"""One model on its optimised path: a graph where one fits, else compiled code, else the model itself, and why."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import is_
from pathlib import Path as Path
from typing import Any

import torch

from pytest_cudagraph.backends.capture_mode import is_capturing
from pytest_cudagraph.errors import CudagraphError
from pytest_cudagraph.protocols import Model
from pytest_cudagraph.serving import compiled_code
from pytest_cudagraph.serving.compiled_code import CompiledCode
from pytest_cudagraph.serving.graph_runner import GraphRunner
from pytest_cudagraph.serving.model_watch import weak_alias
from pytest_cudagraph.serving.proof import ProvenModel, ProvingBackend
from pytest_cudagraph.serving.request import Options, Request
from pytest_cudagraph.serving.statistics import (
    DegradeReason,
    EventLog,
    Fallback,
    InferenceResult,
    ModelStatistics,
    RunnerStatistics,
    ServingPath,
    cause_of,
)

_CHANGED = (
    "the model has changed since; eager code serves, also inside graphs\n"
    "  to have compiled code again: compile_model_aot once more with the same arguments"
)


@dataclass(slots=True)
class _ServedCall:
    """The call that is being served, and what became of it outside of a graph."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    path: ServingPath | None = None
    error: BaseException | None = None
    """What the model itself raised."""

    def is_this(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether these are the caller's own arguments; a runner also calls the model on others, to learn of it."""
        if len(args) != len(self.args) or kwargs.keys() != self.kwargs.keys():
            return False
        return all(map(is_, args, self.args)) and all(kwargs[name] is self.kwargs[name] for name in kwargs)


class ServedModel:
    """The optimised path of one model, safe from any number of threads. It does not keep the model alive.

    No optimisation ever raises out of here; what the model raises comes through as it is.
    """

    def __init__(self, model: Model, request: Request, options: Options) -> None:
        self.request = request
        self._options = options
        self._contents: Model | None = weak_alias(model)
        self._lock = threading.RLock()
        self._diary = EventLog(request.name)
        self._device = ""
        self._code: CompiledCode | None = None
        self._retired: CompiledCode | None = None
        self._has_lost_code = False
        self._compile_ns = 0
        self._runner: GraphRunner | None = None
        self._graphs_before: RunnerStatistics | None = None
        self._eager_before: Mapping[str, int] = {}
        self._asked: _ServedCall | None = None

    @property
    def can_be_renewed(self) -> bool:
        """Whether compiled code was dropped, because the model changed, and may be made again."""
        return self._has_lost_code

    def build(self, folder: Callable[[], Path]) -> None:
        """Compile, capture and prove, as far as it goes. Raises only what the model raises on its example inputs."""
        own_error: Exception | None = None
        with self._lock:
            self._release()
            self._has_lost_code = False
            try:
                site = self._site()
                own_error = compiled_code.error_on(site, self.request.example)
                if own_error is None:
                    self._optimise(site, folder)
            except Exception as error:
                # Whatever an optimisation raises, eager remains.
                self._diary.say(DegradeReason.NOT_CAPTURED, error)
        if own_error is not None:
            raise own_error

    def answer(self, model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> InferenceResult:
        """What ``model``, whose path this is, gives for these arguments, in inference mode.

        Inside of a capture that is the model's own call, and not counted.
        """
        if is_capturing():
            with torch.inference_mode():
                output = model(*args, **kwargs)
            return InferenceResult(output=output, path="eager", reason=Fallback.CAPTURING.value)
        with self._lock:
            asked = self._asked = _ServedCall(args, kwargs)
            try:
                result = self._through_graphs(asked, model) if self._runner else self._without_graphs(asked, model)
            finally:
                self._asked = None
            self._diary.count(result.path, result.reason)
            return result

    def statistics(self) -> ModelStatistics:
        """What was served until now; also after :meth:`close`."""
        with self._lock:
            graphs = self._runner.statistics if self._runner else self._graphs_before
            return ModelStatistics(
                name=self.request.name,
                mode=self.request.mode,
                compile_mode=self.request.compile_mode,
                device=self._device,
                paths=dict(self._diary.paths),
                reasons=dict(self._diary.reasons),
                padded=graphs.padded if graphs else 0,
                compiled_sizes=self._code.sizes if self._code else (),
                compile_ns=self._compile_ns,
                capture_ns=graphs.capture_ns if graphs else 0,
                memory_bytes=dict(graphs.memory_bytes) if graphs else {},
                notes=self._diary.notes,
            )

    def close(self) -> None:
        """Release graphs, compiled code and all hold of the model; calls run eager from then on."""
        with self._lock:
            self._release()
            self._contents = None

    def _site(self) -> compiled_code.ModelSetup:
        if self._contents is None:
            raise CudagraphError("the compiler has been cleaned up")
        backend = compiled_code.open_backend_for(self.request.example, self._options.device)
        self._device = backend.device
        return compiled_code.ModelSetup(model=self._contents, request=self.request, backend=backend)

    def _optimise(self, site: compiled_code.ModelSetup, folder: Callable[[], Path]) -> None:
        options, example = self._options, self.request.example
        if self.request.compile_mode != "none":
            self._code = self._compiled(site, folder)
        if options.graphs:
            call_for = functools.partial(self._call_for, site.model)
            subject = ProvenModel(model=site.model, call_for=call_for, proven=self._look_anew)
            self._runner = GraphRunner(
                functools.partial(self._in_place_of, site.model),
                *example.args,
                kwargs=example.kwargs,
                batch_sizes=options.batch_sizes,
                batch_dim=self.request.batch_dim,
                max_graphs=options.max_graphs,
                backend=ProvingBackend(site.backend, subject),
            )
            self._tell_limits(self._runner.statistics)

    def _compiled(self, site: compiled_code.ModelSetup, folder: Callable[[], Path]) -> CompiledCode | None:
        options, started_ns = self._options, time.perf_counter_ns()
        differs = functools.partial(self._diary.say, DegradeReason.CODE_DIFFERS)
        try:
            return compiled_code.compile_and_prove(
                site, options.batch_sizes, folder, options.compile_timeout_s, differs
            )
        except Exception as error:
            # Whatever a compile raises (no compiler, no time, no room on the disk), graphs can do without it.
            self._diary.say(DegradeReason.NOT_COMPILED, error)
            return None
        finally:
            self._compile_ns += time.perf_counter_ns() - started_ns

    def _through_graphs(self, asked: _ServedCall, model: Model) -> InferenceResult:
        runner = self._runner
        assert runner is not None
        try:
            if self._code is not None and self._code.has_old_weights():
                self._drop_code()
                runner.recapture()
            output = runner(*asked.args, **asked.kwargs)
        except Exception as error:
            # Whatever the optimised path raises, the model answers, unless it was the model itself that raised.
            if asked.error is error:
                raise
            self._diary.say(DegradeReason.NOT_SERVED, error)
            with torch.inference_mode():
                return InferenceResult(
                    output=model(*asked.args, **asked.kwargs), path="eager", reason=Fallback.RAISED.value
                )
        if asked.path is None and self._retired is not None:  # a replay: all graphs are of the model as it is now
            self._retired.close()
            self._retired = None
        # Statistics are asked for only where the model was called: they take longer than a small replay.
        if asked.path is None or not (reason := self._why_no_replay(runner.statistics)):
            return InferenceResult(output=output, path="graph")
        return InferenceResult(output=output, path=asked.path, reason=reason)

    def _why_no_replay(self, graphs: RunnerStatistics) -> str:
        """What the runner has counted since the last time; empty when it did replay."""
        grown = [reason for reason, count in graphs.eager.items() if count > self._eager_before.get(reason, 0)]
        self._eager_before = dict(graphs.eager)
        self._tell_limits(graphs)
        return ", ".join(grown)

    def _without_graphs(self, asked: _ServedCall, model: Model) -> InferenceResult:
        if self._contents is None:
            reason = Fallback.CLEANED_UP
        else:
            reason = Fallback.NO_GRAPHS if self._options.graphs else Fallback.GRAPHS_OFF
        with torch.inference_mode():
            output, path = self._computed(asked, model)
        return InferenceResult(output=output, path=path, reason=reason.value)

    def _in_place_of(self, model: Model, *args: Any, **kwargs: Any) -> Any:
        """What the runner takes for the model, and calls where no graph serves a call."""
        asked = self._asked
        if asked is None or not asked.is_this(args, kwargs):
            return model(*args, **kwargs)
        output, asked.path = self._computed(asked, model)
        return output

    def _computed(self, asked: _ServedCall, model: Model) -> tuple[Any, ServingPath]:
        """The answer of compiled code made for such a call; else of the model."""
        code, failure = self._current_code(), None
        call = code.fitting(asked.args, asked.kwargs) if code else None
        if call is not None:
            try:
                return call(*asked.args, **asked.kwargs), "compiled"
            # Whatever compiled code raises, the model decides whether the call can be answered.
            except Exception as error:
                failure = error
        try:
            output = model(*asked.args, **asked.kwargs)
        except Exception as error:
            asked.error = error
            raise
        if code is not None and failure is not None:
            code.stop_serving()  # graphs captured from it were proven, and stay
            self._diary.say(DegradeReason.CODE_DIFFERS, f"it raised where the model does not: {cause_of(failure)}")
        return output, "eager"

    def _call_for(self, model: Model, size: int) -> Model:
        """What a graph of this batch size is captured from."""
        code = self._current_code()
        return (code.call_for(size) if code else None) or model

    def _look_anew(self) -> None:
        if self._code is not None:
            self._code.look_anew()

    def _current_code(self) -> CompiledCode | None:
        if self._code is not None and self._code.is_outdated():
            self._drop_code()
        return self._code

    def _drop_code(self) -> None:
        """Use it no more. It is released later: until the runner drops its graphs, they may be reading from it."""
        self._diary.say(DegradeReason.CODE_DROPPED, _CHANGED)
        self._has_lost_code = True
        self._retired, self._code = self._code, None

    def _tell_limits(self, graphs: RunnerStatistics) -> None:
        for size, why in graphs.refused.items():
            self._diary.say(DegradeReason.NOT_CAPTURED, f"batch {size}: {why}")
        if graphs.not_padded:
            self._diary.say(DegradeReason.NOT_PADDED, graphs.not_padded)

    def _release(self) -> None:
        runner, self._runner = self._runner, None
        made = [code for code in (self._code, self._retired) if code is not None]
        self._code = self._retired = None
        self._eager_before = {}
        try:
            if runner is not None:
                runner.close()
                self._graphs_before = runner.statistics
        finally:
            for code in made:
                code.close()
