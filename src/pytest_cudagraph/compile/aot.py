"""Compile mode ``aot``: export a model, compile it with AOTInductor, and load the package.

A package runs no Python of the model and holds its own weights and buffers. So it does not see parameters updated after
the compile, and the module does not see state that the package writes. The check stage compares both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytest_cudagraph import pytree
from pytest_cudagraph.compile.cache import PackageCache, compile_options, content_key
from pytest_cudagraph.compile.packages import BuildOptions, build
from pytest_cudagraph.compile.time_limit import Deadline
from pytest_cudagraph.errors import CudagraphError, InputError
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.inputs.example import argument_name
from pytest_cudagraph.protocols import Backend, CompiledRegion, Model

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """The tensor that compiled code takes for one argument."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The spec of ``tensor``."""
        return cls(shape=tensor.shape, stride=tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    def fits(self, value: Any) -> bool:
        """Whether ``value`` is such a tensor. Strides may differ."""
        if not isinstance(value, torch.Tensor):
            return False
        return (value.shape, value.dtype, value.device) == (self.shape, self.dtype, self.device)

    def laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` with these strides. A package relies on them without a check."""
        if tensor.stride() == self.stride:
            return tensor
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).copy_(tensor)

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')} on {self.device}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentLayout:
    """The structure of a value, its plain values, and the specs of its tensors by position."""

    structure: pytree.Structure
    plain: tuple[Any, ...]
    """All leaves, None for tensors."""
    specs: Mapping[int, TensorSpec]

    @classmethod
    def of(cls, value: Any) -> ArgumentLayout:
        """The layout of ``value``."""
        flat, structure = pytree.flatten(value)
        specs = {i: TensorSpec.of(leaf) for i, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor)}
        plain = tuple(None if i in specs else leaf for i, leaf in enumerate(flat))
        return cls(structure=structure, plain=plain, specs=specs)

    def fill(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The value with these tensors."""
        flat = list(self.plain)
        for i, tensor in zip(self.specs, tensors, strict=True):
            flat[i] = tensor
        return pytree.unflatten(self.structure, flat)

    def tensors_of(self, value: Any) -> list[torch.Tensor]:
        """The tensors of ``value``. Raises :class:`InputError` naming the first leaf that does not fit."""
        flat, structure = pytree.flatten(value)
        if structure != self.structure:
            raise InputError("the package takes arguments of the structure of the example inputs, found another one")
        for i, leaf in enumerate(flat):
            self._check(i, leaf)
        return [spec.laid_out(flat[i]) for i, spec in self.specs.items()]

    def _check(self, position: int, leaf: Any) -> None:
        spec, plain = self.specs.get(position), self.plain[position]
        if spec.fits(leaf) if spec else leaf is plain or leaf == plain:
            return
        where = argument_name(pytree.paths(self.structure)[position])
        expected = spec or repr(plain)
        form = TensorSpec.of(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf)
        raise InputError(f"{where}: the package is compiled for {expected}, found {form}")


class TracedResult:
    """The layout of a traced call's result. A separate object, because export resets the attributes of a module."""

    def __init__(self) -> None:
        self._layout: ArgumentLayout | None = None

    @property
    def layout(self) -> ArgumentLayout:
        """The layout, known after the trace."""
        if self._layout is None:
            raise CudagraphError("the model was not called while it was exported")
        return self._layout

    def take(self, value: Any) -> tuple[torch.Tensor, ...]:
        """Store the layout of ``value`` and return its tensors."""
        for path, leaf in pytree.named_leaves(value):
            if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
                raise CudagraphError(
                    f"output{path} has type {type(leaf).__name__}, but a package holds only tensors and plain values\n"
                    "  to fix: return dicts, lists or tuples of these (transformers: use_cache=False), "
                    "or use compile='inductor'"
                )
        self._layout = ArgumentLayout.of(value)
        return tuple(pytree.tensors_in(value))


class FlatModel(torch.nn.Module):
    """The model as a function of flat lists of tensors, which is all that a package supports."""

    def __init__(self, model: Model, arguments: ArgumentLayout) -> None:
        super().__init__()
        self.model = model
        self.arguments = arguments
        self.result = TracedResult()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rebuild the arguments, call the model, and store the layout of the result."""
        args, kwargs = self.arguments.fill(tensors)
        return self.result.take(self.model(*args, **kwargs))


class NestedCall:
    """A package with the signature of the model it was made from."""

    def __init__(self, region: CompiledRegion, arguments: ArgumentLayout, result: ArgumentLayout) -> None:
        self._region = region
        self._arguments = arguments
        self._result = result

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the package. Raises :class:`~pytest_cudagraph.errors.InputError` if compiled for other arguments."""
        return self._result.fill(self._region(*self._arguments.tensors_of((args, kwargs))))


WEIGHTS_NOTE = "the package holds its own weights and buffers: it does not see later in-place updates"
CACHE_NOTE = "package from cache"
DAMAGED_NOTE = "the cached package was damaged and has been rebuilt"
UNCACHED_NOTE = "not cached: the graph holds parts that cannot be hashed (own Triton kernels, tensor subclasses)"

Runner = Callable[[list[torch.Tensor]], list[torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AotCompiler:
    """Exports a model, then builds the package or finds it in the cache, then loads it."""

    backend: Backend
    cache: PackageCache
    deadline: Deadline

    def compile(self, model: Model, example: Example, label: str) -> tuple[NestedCall, CompiledRegion, tuple[str, ...]]:
        """The package as a call, its region, and notes. Raises errors of PyTorch, and :class:`TimeoutError`."""
        require_capturable(self.backend)
        arguments = ArgumentLayout.of((example.args, example.kwargs))
        flat = FlatModel(model, arguments)
        # Export each time: the key is the exported graph, because no hash of source code identifies a computation.
        tensors = tuple(arguments.tensors_of((example.args, example.kwargs)))
        program = torch.export.export(flat, tensors, strict=False)
        runner, notes = self._runner(program)
        region = self.backend.region(lambda *tensors: runner(list(tensors)), label)
        return NestedCall(region, arguments, flat.result.layout), region, (*notes, WEIGHTS_NOTE)

    def _runner(self, program: ExportedProgram) -> tuple[Runner, tuple[str, ...]]:
        settings = BuildOptions.here(compile_options())
        key = content_key(program, device=self.backend.device, options=settings.options)
        if key is None:
            with self.cache.build_folder() as folder:
                built, notes = build(program, folder, settings, self.deadline.remaining_s)
                return load(built, self.backend.device), (*notes, UNCACHED_NOTE)
        with self.cache.locked(key, self.deadline.remaining_s):
            cached, cache_notes = self._cached(key)
            if cached is not None:
                return cached, cache_notes
            with self.cache.build_folder() as folder:
                built, notes = build(program, folder, settings, self.deadline.remaining_s)
                return load(self.cache.store(key, built), self.backend.device), (*notes, *cache_notes)

    def _cached(self, key: str) -> tuple[Runner | None, tuple[str, ...]]:
        if self.cache.is_damaged(key):
            return None, (DAMAGED_NOTE,)
        path = self.cache.find(key)
        if path is None:
            return None, ()
        try:
            return load(path, self.backend.device), (CACHE_NOTE,)
        except (RuntimeError, OSError, ValueError):
            # The checksum is right, but the package does not load.
            return None, (DAMAGED_NOTE,)


def load(package: Path, device: str) -> Runner:
    """Load the package without thread synchronization, which a capture would refuse. Returns its entry point."""
    from torch._inductor import aoti_load_package

    index = torch.device(device).index
    wanted = {"run_single_threaded": True, "device_index": -1 if index is None else index}
    options: dict[str, Any] = {name: value for name, value in wanted.items() if name in _load_parameters()}
    loader: Any = aoti_load_package(str(package), **options).loader
    # The object around the loader parses the structure of its arguments in each call: 5 times a small run.
    runner: Runner = getattr(loader, "boxed_run", None) or loader.run
    return runner


def _load_parameters() -> Mapping[str, inspect.Parameter]:
    from torch._inductor import aoti_load_package

    return inspect.signature(aoti_load_package).parameters


def require_capturable(backend: Backend) -> None:
    """Raise :class:`CudagraphError` if packages of this torch cannot be captured on CUDA."""
    if backend.kind == "cuda" and "run_single_threaded" not in _load_parameters():
        raise CudagraphError(
            f"compile='aot' on CUDA needs torch 2.7 or newer, found {torch.__version__}: its packages "
            "synchronize threads, which a capture refuses\n  to fix: install a newer torch, or use compile='inductor'"
        )
