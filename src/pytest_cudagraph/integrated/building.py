"""Making the optimised path of one model: a device, compiled code that is proven, and not a trace in the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from pytest_cudagraph import inputs, leaves
from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.compile import Compiled, compile_model
from pytest_cudagraph.compile.causes import first_line
from pytest_cudagraph.compile.inductor import patient
from pytest_cudagraph.device import choose
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.inputs.objects import opaque_arguments
from pytest_cudagraph.integrated.code import CompiledCode
from pytest_cudagraph.integrated.proof import CompiledArm, why_unlike_eager
from pytest_cudagraph.integrated.request import Request
from pytest_cudagraph.protocols import Backend, Model
from pytest_cudagraph.runner.calls import CallForm
from pytest_cudagraph.state import Undo


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
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
    tensors = leaves.tensors_in((example.args, example.kwargs))
    given = tensors[0].device if tensors else torch.device("cpu")
    kind = choose(given.type if device == "auto" else device).kind
    with torch.cuda.device(given) if kind == given.type == "cuda" else nullcontext():
        backend = open_backend(kind)
    inputs.check_device(example, backend.device)
    return backend


def error_on(site: Site, example: Example) -> Exception | None:
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
    site: Site,
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


def _is_taken(site: Site, size: int, example: Example, differs: Callable[[str], None]) -> bool:
    error = error_on(site, example)
    if error is not None:
        differs(f"batch {size}: the model raises {first_line(error)}")
    return error is None


def _is_proven(site: Site, compiled: Compiled, size: int, example: Example, differs: Callable[[str], None]) -> bool:
    call = compiled.call_for(size)
    # A check asks what no call has asked before; code with breaks may have to compile another branch for it.
    with patient() if compiled.mode == "inductor" else nullcontext():
        why = why_unlike_eager(CompiledArm(call, size), call, site.model, example, site.backend)
    if why:
        differs(f"batch {size}: {why}")
    return not why
