"""Compiled code of one model: compiled, checked against eager, and outdated when the model changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pytest_cudagraph import inputs
from pytest_cudagraph.backends.capture_mode import autocast_dtype
from pytest_cudagraph.compile import Compiled, compile_model
from pytest_cudagraph.compile.inductor import raised_limits
from pytest_cudagraph.errors import first_line
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.inputs.example import opaque_arguments
from pytest_cudagraph.model_watch import ModelWatch
from pytest_cudagraph.protocols import Backend, Model
from pytest_cudagraph.serving.graph_check import CompiledAsGraph, difference_from_eager
from pytest_cudagraph.serving.request import CompilerOptions, Request
from pytest_cudagraph.serving.rows import CallForm
from pytest_cudagraph.state import Undo, modules_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSetup:
    """A model, the request for it, and the backend it runs on."""

    model: Model
    request: Request
    backend: Backend

    def undo(self) -> Undo:
        """The present state of the model, to be restored."""
        return Undo(self.model, self.backend, extras=opaque_arguments([self.request.example]))

    def eager_error(self, example: Example) -> Exception | None:
        """The exception that the model itself raises on an example; the state of the model is restored."""
        given = inputs.clone(example)
        with self.undo().undone(), self.backend.running():
            try:
                self.model(*given.args, **given.kwargs)
            # A model may raise anything.
            except Exception as error:
                return error
        return None


class CompiledCode:
    """Compiled code of the batch sizes that agree with eager, and a watch on the model it was compiled from."""

    def __init__(self, compiled: Compiled, sizes: Collection[int], setup: ModelSetup) -> None:
        self.sizes = tuple(sorted(sizes))
        self._compiled, self._is_serving = compiled, True
        self._form = CallForm(setup.request.example, setup.request.batch_dim)
        self._device_type = torch.device(setup.backend.device).type
        self._autocast = autocast_dtype(self._device_type)
        self._watch = ModelWatch(setup.model)
        # A package has its own copy of the weights; other compiled code reads the model's.
        self._copied = _tensors(setup.model) if compiled.mode == "aot" else []
        self._versions = _versions(self._copied)

    def call_for(self, size: int) -> Model | None:
        """The code of one batch size; None where there is none that agrees with eager."""
        return self._compiled.call_for(size) if size in self.sizes else None

    def call_matching(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Model | None:
        """The code that was compiled for this form of arguments, batch size and autocast; else None."""
        if not self._is_serving or autocast_dtype(self._device_type) != self._autocast:
            return None
        rows = self._form.read(args, kwargs, self.sizes[-1])[1]
        return self.call_for(rows) if isinstance(rows, int) else None

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
    setup: ModelSetup, options: CompilerOptions, folder: Callable[[], Path], on_difference: Callable[[str], None]
) -> CompiledCode | None:
    """Compile each batch size; None if none agrees with eager. ``on_difference`` gets the reason for each left out.

    Raises what :func:`~pytest_cudagraph.compile.compile_model` raises, and what the check raises.
    """
    example, request = setup.request.example, setup.request
    sized = inputs.batch_examples(example, options.batch_sizes, request.batch_dim)
    examples = {}
    for size, each in sized.items():
        if error := setup.eager_error(each):
            on_difference(f"batch {size}: the model raises {first_line(error)}")
        else:
            examples[size] = each
    undo, limit_s = setup.undo(), options.compile_timeout_s
    with undo.undone():
        compiled = compile_model(
            setup.model, examples, request.compile_mode, setup.backend, cache_dir=folder(), time_limit_s=limit_s
        )
    undo.assert_unchanged()
    checked = []
    for size, each in examples.items():
        if difference := _difference(setup, compiled, size, each):
            on_difference(f"batch {size}: {difference}")
        else:
            checked.append(size)
    if checked:
        return CompiledCode(compiled, checked, setup)
    compiled.close()
    return None


def _difference(setup: ModelSetup, compiled: Compiled, size: int, example: Example) -> str:
    call = compiled.call_for(size)
    # For the inputs of the check, code with graph breaks may have to compile another branch.
    with raised_limits() if compiled.mode == "inductor" else nullcontext():
        return difference_from_eager(CompiledAsGraph(call, size), call, setup.model, example, setup.backend)
