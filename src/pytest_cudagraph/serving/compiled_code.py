"""Compiled code of one model: made, proven, and dropped when the model changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pytest_cudagraph import inputs, pytree
from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.backends.capture_mode import autocast_dtype
from pytest_cudagraph.compile import Compiled, compile_model
from pytest_cudagraph.compile.inductor import patient
from pytest_cudagraph.device import choose
from pytest_cudagraph.errors import first_line
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.inputs.example import opaque_arguments
from pytest_cudagraph.protocols import Backend, Model
from pytest_cudagraph.serving.model_watch import ModelWatch
from pytest_cudagraph.serving.proof import CompiledArm, why_unlike_eager
from pytest_cudagraph.serving.request import Request
from pytest_cudagraph.serving.rows import CallForm
from pytest_cudagraph.state import Undo, modules_of


class CompiledCode:
    """The batch sizes whose compiled code has been proven, and a watch on the model it was compiled from."""

    def __init__(self, compiled: Compiled, sizes: Collection[int], model: Model, form: CallForm, device: str) -> None:
        self.sizes = tuple(sorted(sizes))
        self._compiled, self._form, self._serves = compiled, form, True
        self._device_type = torch.device(device).type
        self._autocast = autocast_dtype(self._device_type)
        self._watch = ModelWatch(model)
        # A package has its own copy of the weights; other compiled code reads those of the model.
        self._copied = _tensors(model) if compiled.mode == "aot" else []
        self._versions = _versions(self._copied)

    def call_for(self, size: int) -> Model | None:
        """What runs at one batch size; None where there is no proven code."""
        return self._compiled.call_for(size) if size in self.sizes else None

    def fitting(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Model | None:
        """What was compiled for exactly such a call: form, batch size and autocast; None where nothing was."""
        if not self._serves or autocast_dtype(self._device_type) != self._autocast:
            return None
        rows = self._form.read(args, kwargs, self.sizes[-1])[1]
        return self.call_for(rows) if isinstance(rows, int) else None

    def has_old_weights(self) -> bool:
        """Whether weights that the code has copied were written since; 0.1 µs for each, so asked before every call."""
        return _versions(self._copied) != self._versions

    def stop_serving(self) -> None:
        """Fit no call any more; graphs may still be captured from it."""
        self._serves = False

    def look_anew(self) -> None:
        """Take the weights as they are for those that the code has: they were written to, and put back."""
        self._versions = _versions(self._copied)

    def is_outdated(self) -> bool:
        """Whether the model is another one than the code was compiled from."""
        return self.has_old_weights() or self._watch.has_changed()

    def close(self) -> None:
        """Release the code."""
        self._compiled.close()


def _tensors(model: Model) -> list[torch.Tensor]:
    held = [tensor for module in modules_of(model) for tensor in (*module.parameters(), *module.buffers())]
    return [tensor for tensor in held if not tensor.is_inference()]  # those count no versions


def _versions(tensors: list[torch.Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSetup:
    """Where a model is built: the device, and what was asked for."""

    model: Model
    request: Request
    backend: Backend

    def undo(self) -> Undo:
        """The model as it is now."""
        return Undo(self.model, self.backend, extras=opaque_arguments([self.request.example]))


def open_backend_for(example: Example, device: str) -> Backend:
    """The backend of ``device``; with ``auto``, of the device that the example inputs lie on.

    Raises :class:`~pytest_cudagraph.errors.DeviceUnavailable`, and
    :class:`~pytest_cudagraph.errors.InputError` for inputs that lie elsewhere.
    """
    tensors = pytree.tensors_in((example.args, example.kwargs))
    given = tensors[0].device if tensors else torch.device("cpu")
    kind = choose(given.type if device == "auto" else device).kind
    with torch.cuda.device(given) if kind == given.type == "cuda" else nullcontext():
        backend = open_backend(kind)
    inputs.check_device(example, backend.device)
    return backend


def error_on(site: ModelSetup, example: Example) -> Exception | None:
    """What the model itself raises on an example; it is left as it was."""
    given = inputs.clone(example)
    with site.undo().undone(), site.backend.running():
        try:
            site.model(*given.args, **given.kwargs)
        # Whatever it is, it is the model's own, and none of an optimisation's.
        except Exception as error:
            return error
    return None


def compile_and_prove(
    site: ModelSetup,
    batch_sizes: Sequence[int],
    folder: Callable[[], Path],
    time_limit_s: float,
    differs: Callable[[str], None],
) -> CompiledCode | None:
    """Compiled code of the batch sizes at which it gives eager's answers; ``differs`` hears of the others.

    Raises what :func:`~pytest_cudagraph.compile.compile_model` raises, and what the check raises.
    """
    example = site.request.example
    examples = inputs.batch_examples(example.args, example.kwargs, batch_sizes, site.request.batch_dim)
    examples = {size: each for size, each in examples.items() if _is_taken(site, size, each, differs)}
    mode, undo = site.request.compile_mode, site.undo()
    with undo.undone():
        compiled = compile_model(
            site.model, examples, mode, site.backend, cache_dir=folder(), time_limit_s=time_limit_s
        )
    undo.assert_unchanged()
    proven = [size for size, each in examples.items() if _is_proven(site, compiled, size, each, differs)]
    if not proven:
        compiled.close()
        return None
    return CompiledCode(compiled, proven, site.model, CallForm(example, site.request.batch_dim), site.backend.device)


def _is_taken(site: ModelSetup, size: int, example: Example, differs: Callable[[str], None]) -> bool:
    error = error_on(site, example)
    if error is not None:
        differs(f"batch {size}: the model raises {first_line(error)}")
    return error is None


def _is_proven(
    site: ModelSetup, compiled: Compiled, size: int, example: Example, differs: Callable[[str], None]
) -> bool:
    call = compiled.call_for(size)
    # A check asks what no call has asked before; code with breaks may have to compile another branch for it.
    with patient() if compiled.mode == "inductor" else nullcontext():
        why = why_unlike_eager(CompiledArm(call, size), call, site.model, example, site.backend)
    if why:
        differs(f"batch {size}: {why}")
    return not why
