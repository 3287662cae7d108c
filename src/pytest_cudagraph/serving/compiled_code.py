"""Compiled code and graphs of one model: prepared and checked against eager, and outdated when the model changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pytest_cudagraph import inputs
from pytest_cudagraph.backends.capture_mode import autocast_dtype
from pytest_cudagraph.compile import Compiled
from pytest_cudagraph.errors import CaptureRefusal, first_line
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.model_watch import ModelWatch
from pytest_cudagraph.pipeline.stages import PreparedCall, Stages, prepare
from pytest_cudagraph.protocols import Backend, CapturedGraph, GraphPool, Model
from pytest_cudagraph.serving.graph_set import REFUSALS
from pytest_cudagraph.serving.request import CompilerOptions, Request
from pytest_cudagraph.serving.rows import CallForm
from pytest_cudagraph.state import modules_of


class CompiledCode:
    """Compiled code of the batch sizes that agree with eager, and a watch on the model it was compiled from."""

    def __init__(self, compiled: Compiled, sizes: Collection[int], stages: Stages, request: Request) -> None:
        self.sizes = tuple(sorted(sizes))
        self._compiled, self._is_serving = compiled, True
        self._form = CallForm(request.example, request.batch_dim)
        self._device_type = torch.device(stages.backend.device).type
        self._autocast = autocast_dtype(self._device_type)
        self._watch = ModelWatch(stages.model)
        # A package has its own copy of the weights; other compiled code reads the model's.
        self._copied = _tensors(stages.model) if compiled.mode == "aot" else []
        self._versions = _versions(self._copied)

    def at(self, size: int) -> Compiled | None:
        """The code, if that of this batch size agrees with eager."""
        return self._compiled if size in self.sizes else None

    def call_matching(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Model | None:
        """The code that was compiled for this form of arguments, batch size and autocast; else None."""
        if not self._is_serving or autocast_dtype(self._device_type) != self._autocast:
            return None
        rows = self._form.read(args, kwargs, self.sizes[-1])[1]
        return self._compiled.call_for(rows) if isinstance(rows, int) and rows in self.sizes else None

    def has_old_weights(self) -> bool:
        """Whether weights were written that the code has copied; runs before every call, 0.1 µs per tensor."""
        return _versions(self._copied) != self._versions

    def stop_serving(self) -> None:
        """Match no call any more; graphs can still be captured from the code."""
        self._is_serving = False

    def accept_weights(self) -> None:
        """Take the present versions of the weights as those that the code has copied."""
        self._versions = _versions(self._copied)

    def is_outdated(self) -> bool:
        """Whether the model has changed since it was compiled."""
        return self.has_old_weights() or self._watch.has_changed()

    def close(self) -> None:
        """Release the code."""
        self._compiled.close()


def _tensors(model: Model) -> list[torch.Tensor]:
    held = [tensor for module in modules_of(model) for tensor in (*module.parameters(), *module.buffers())]
    return [tensor for tensor in held if not tensor.is_inference()]  # inference tensors have no version counter


def _versions(tensors: list[torch.Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]


def compile_and_check(
    stages: Stages,
    request: Request,
    options: CompilerOptions,
    folder: Callable[[], Path],
    on_difference: Callable[[str], None],
) -> CompiledCode | None:
    """Compile each batch size; None if none agrees with eager. ``on_difference`` gets the reason for each left out.

    Raises what :func:`~pytest_cudagraph.compile.compile_model` raises, and what the check raises.
    """
    examples = inputs.batch_examples(request.example, options.batch_sizes, request.batch_dim)
    stages = replace(stages, examples=examples)
    errors = {size: stages.eager_error(size) for size in examples}
    for size, error in errors.items():
        if error is not None:
            on_difference(f"batch {size}: the model raises {first_line(error)}")
    stages = replace(stages, examples={size: each for size, each in examples.items() if errors[size] is None})
    limit_s = options.compile_timeout_s
    compiled = stages.compile(request.compile_mode, cache_dir=folder(), time_limit_s=limit_s)
    checked = []
    for size in stages.examples:
        try:
            prepare(stages, size, compiled, pool=None)
        except CaptureRefusal as difference:
            on_difference(f"batch {size}: {difference}")
        else:
            checked.append(size)
    if checked:
        return CompiledCode(compiled, checked, stages, request)
    compiled.close()
    return None


class CheckedBackend:
    """A backend whose pools refuse a graph that does not give eager's outputs.

    ``compiled_for`` gives the compiled code of a batch size, or None to capture the model itself. A check writes to the
    model's weights and restores them; ``on_check`` is called after each.
    """

    def __init__(
        self, backend: Backend, compiled_for: Callable[[int], Compiled | None], on_check: Callable[[], None]
    ) -> None:
        self._backend, self._compiled_for, self._on_check = backend, compiled_for, on_check
        self.kind, self.device = backend.kind, backend.device
        # Attributes add no cost to a call, in contrast to methods.
        self.synchronize, self.order_after, self.running = backend.synchronize, backend.order_after, backend.running
        self.region, self.event_timer = backend.region, backend.event_timer
        self.rng_state, self.set_rng_state = backend.rng_state, backend.set_rng_state

    def pool(self) -> GraphPool:
        """A pool for the graphs of one model."""
        return CheckedPool(self._backend, self._compiled_for, self._on_check)


class CheckedPool:
    """See :class:`~pytest_cudagraph.protocols.GraphPool` and :class:`CheckedBackend`."""

    def __init__(
        self, backend: Backend, compiled_for: Callable[[int], Compiled | None], on_check: Callable[[], None]
    ) -> None:
        self._backend, self._compiled_for, self._on_check = backend, compiled_for, on_check
        self._pool = backend.pool()
        self._prepared: dict[int, PreparedCall] = {}

    def capture(
        self,
        model: Model,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        batch_size: int,
        rewind: Callable[[], None] = lambda: None,
    ) -> CapturedGraph:
        """Capture the model, or its compiled code of this batch size, and check the graph.

        The preparation restores the state itself, so ``rewind`` is not used. Raises
        :class:`~pytest_cudagraph.errors.CaptureRefusal`, also for any other exception of capture or check. Eager can
        then serve this batch size.
        """
        stages = Stages(
            model=model, examples={batch_size: Example(args=args, kwargs=dict(kwargs))}, backend=self._backend
        )
        try:
            prepared = prepare(stages, batch_size, self._compiled_for(batch_size), self._pool)
        except REFUSALS:
            raise
        except Exception as error:
            raise CaptureRefusal(first_line(error)) from error
        finally:
            self._on_check()
        self._prepared[batch_size] = prepared
        assert prepared.graph is not None
        return prepared.graph

    def close(self) -> None:
        """Release all graphs and what they read."""
        try:
            self._pool.close()
        finally:
            self._prepared.clear()

    def __enter__(self) -> CheckedPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
