"""``torch.export`` and AOTInductor for one batch size: a package that runs no Python of the model.

Weights and buffers live inside the package. Parameters updated in place after the compile are not seen by it, and state
that the model writes does not come back to the module; the check stage compares both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytest_cudagraph.compile.cache import PackageCache
from pytest_cudagraph.compile.keys import compile_options, content_key
from pytest_cudagraph.compile.layout import FlatModel, Layout, NestedCall
from pytest_cudagraph.compile.packaging import Order, build
from pytest_cudagraph.compile.timelimit import Deadline
from pytest_cudagraph.errors import CudagraphError
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.protocols import Backend, CompiledRegion, Model

if TYPE_CHECKING:
    from torch.export import ExportedProgram

WEIGHTS_NOTE = "weights and buffers live in the package: in-place updates made after the compile are not seen"
CACHE_NOTE = "package from cache"
DAMAGED_NOTE = "the cached package was damaged and has been rebuilt"
UNCACHED_NOTE = "not cached: the graph holds parts whose content has no key (own Triton kernels, tensor subclasses)"

Runner = Callable[[list[torch.Tensor]], list[torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AotCompiler:
    """Exports, then packages or finds the package, then loads."""

    backend: Backend
    cache: PackageCache
    deadline: Deadline

    def compile(self, model: Model, example: Example, label: str) -> tuple[NestedCall, CompiledRegion, tuple[str, ...]]:
        """The package's call, its one region, and notes. Raises what PyTorch raises, and :class:`TimeoutError`."""
        _require_capturable(self.backend)
        arguments = Layout.of((example.args, example.kwargs))
        flat = FlatModel(model, arguments)
        # Each time: the key is the exported graph itself, for no hash of source code tells what a model computes.
        tensors = tuple(arguments.tensors_of((example.args, example.kwargs)))
        program = torch.export.export(flat, tensors, strict=False)
        runner, notes = self._runner(program)
        region = self.backend.region(lambda *tensors: runner(list(tensors)), label)
        return NestedCall(region, arguments, flat.result.layout), region, (*notes, WEIGHTS_NOTE)

    def _runner(self, program: ExportedProgram) -> tuple[Runner, tuple[str, ...]]:
        order = Order.here(compile_options())
        key = content_key(program, device=self.backend.device, options=order.options)
        if key is None:
            with self.cache.workshop() as folder:
                built, notes = build(program, folder, order, self.deadline.remaining_s)
                return load(built, self.backend.device), (*notes, UNCACHED_NOTE)
        with self.cache.locked(key, self.deadline.remaining_s):
            cached, found = self._cached(key)
            if cached is not None:
                return cached, found
            with self.cache.workshop() as folder:
                built, notes = build(program, folder, order, self.deadline.remaining_s)
                return load(self.cache.store(key, built), self.backend.device), (*notes, *found)

    def _cached(self, key: str) -> tuple[Runner | None, tuple[str, ...]]:
        if self.cache.is_damaged(key):
            return None, (DAMAGED_NOTE,)
        path = self.cache.find(key)
        if path is None:
            return None, ()
        try:
            return load(path, self.backend.device), (CACHE_NOTE,)
        except (RuntimeError, OSError, ValueError):
            # The bytes are those that were stored, yet they do not load.
            return None, (DAMAGED_NOTE,)


def load(package: Path, device: str) -> Runner:
    """The package's own entry point, without the thread synchronisation that a capture would refuse."""
    from torch._inductor import aoti_load_package

    index = torch.device(device).index
    wanted = {"run_single_threaded": True, "device_index": -1 if index is None else index}
    options: dict[str, Any] = {name: value for name, value in wanted.items() if name in _load_parameters()}
    loader: Any = aoti_load_package(str(package), **options).loader
    # The object around it parses the nesting of its arguments anew in each call, at five times the cost of a small run.
    runner: Runner = getattr(loader, "boxed_run", None) or loader.run
    return runner


def _load_parameters() -> Mapping[str, inspect.Parameter]:
    from torch._inductor import aoti_load_package

    return inspect.signature(aoti_load_package).parameters


def _require_capturable(backend: Backend) -> None:
    if backend.kind == "cuda" and "run_single_threaded" not in _load_parameters():
        raise CudagraphError(
            f"compile='aot' on CUDA needs torch 2.7 or newer; found {torch.__version__}, whose loaded packages "
            "synchronise threads, which a capture refuses\n  to go on: a newer torch, or compile='inductor'"
        )
