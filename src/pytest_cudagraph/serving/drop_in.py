"""Several models, each on its optimised path, found again by identity and never kept alive."""

from __future__ import annotations

import functools
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytest_cudagraph.errors import InputError
from pytest_cudagraph.protocols import Model
from pytest_cudagraph.serving.model_watch import is_same, reference_to
from pytest_cudagraph.serving.request import Options, make_request
from pytest_cudagraph.serving.served_model import ServedModel
from pytest_cudagraph.serving.statistics import CompilerStatistics, EventLog, Fallback, InferenceResult

if TYPE_CHECKING:
    from pytest_cudagraph.serving.statistics import InferenceResult, ModelStatistics

_GIVES_ITSELF = frozenset(
    {"eval", "train", "to", "cpu", "cuda", "half", "float", "double", "bfloat16", "type", "requires_grad_", "apply"}
)
"""Methods of a module that hand the module back: through the handle, they hand the handle back."""


class OptimizedModel:
    """A model that serves its calls from graphs or compiled code where it can, and from itself where it cannot.

    Calls are as the model's own, in inference mode. Attributes are the model's: ``handle.config``, ``handle.eval()``;
    a method such as ``generate`` runs the model itself. It keeps the model alive.
    """

    __slots__ = ("__weakref__", "_model", "_served")

    def __init__(self, model: Model, served: ServedModel) -> None:
        self._model, self._served = model, served

    @property
    def original(self) -> Model:
        """The model as it was handed in."""
        return self._model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns; raises what the model raises."""
        return self._served.answer(self._model, args, kwargs).output

    def infer(self, *args: Any, **kwargs: Any) -> InferenceResult:
        """The same, with what served the call, and why it was no graph."""
        return self._served.answer(self._model, args, kwargs)

    def statistics(self) -> ModelStatistics:
        """What was served until now."""
        return self._served.statistics()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._model, name)
        return functools.partial(self._itself_after, found) if name in _GIVES_ITSELF and callable(found) else found

    def __repr__(self) -> str:
        return f"OptimizedModel({self._served.request.name!r}, mode={self._served.request.mode!r})"

    def _itself_after(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        given = method(*args, **kwargs)
        return self if given is self._model else given


_COMPILE_TIMEOUT_S = 600.0


def create_integrated_compiler(
    *,
    enable_cuda_graphs: bool = True,
    batch_sizes: Sequence[int] = (1, 2, 4, 8),
    cache_dir: str | Path | None = None,
    device: str = "auto",
    max_graphs: int | None = None,
    compile_timeout_s: float = _COMPILE_TIMEOUT_S,
) -> IntegratedAOTCompiler:
    """A compiler for a pipeline; see :class:`IntegratedAOTCompiler`, which takes the same arguments."""
    return IntegratedAOTCompiler(
        enable_cuda_graphs=enable_cuda_graphs,
        batch_sizes=batch_sizes,
        cache_dir=cache_dir,
        device=device,
        max_graphs=max_graphs,
        compile_timeout_s=compile_timeout_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    model: Callable[[], Model | None]
    served: ServedModel


class IntegratedAOTCompiler:
    """Compiles and captures models for a pipeline, which goes on as if they were its own::

        with create_integrated_compiler(batch_sizes=(1, 2, 4, 8), cache_dir="compiled") as compiler:
            model = compiler.compile_model_aot(model, (tokens,), {"model_name": "ranker"}, "default")
            scores = model(tokens)

    Whatever cannot be optimised runs eager: it is logged once under ``pytest_cudagraph.serving``, counted in
    :meth:`statistics`, and never raised. Safe from any number of threads. ``cache_dir`` keeps ahead-of-time packages
    for later processes; without it, :meth:`cleanup` removes them. ``device`` is ``cuda``, ``cpu``, or ``auto``: where
    the example inputs lie. ``max_graphs`` bounds the graphs of each model, ``compile_timeout_s`` the compile of one
    model for all batch sizes together. Raises :class:`~pytest_cudagraph.errors.InputError` for options that cannot be.
    """

    def __init__(
        self,
        *,
        enable_cuda_graphs: bool = True,
        batch_sizes: Sequence[int] = (1, 2, 4, 8),
        cache_dir: str | Path | None = None,
        device: str = "auto",
        max_graphs: int | None = None,
        compile_timeout_s: float = _COMPILE_TIMEOUT_S,
    ) -> None:
        self._options = Options(
            graphs=enable_cuda_graphs,
            batch_sizes=batch_sizes,
            device=device,
            max_graphs=max_graphs,
            compile_timeout_s=compile_timeout_s,
        )
        self._cache_dir = None if cache_dir is None else Path(cache_dir)
        self._own_folder: Path | None = None
        self._entries: tuple[_Entry, ...] = ()  # replaced, never changed, so that a call may read it without the lock
        self._lock = threading.Lock()  # held for moments only: no call waits for a compile
        self._building = threading.RLock()
        self._others = EventLog("other models")
        self._is_open = True

    def compile_model_aot(
        self,
        model: Model,
        example_inputs: Any,
        model_config: Any = None,
        compilation_mode: str = "default",
        *,
        batch_dim: Any = 0,
    ) -> OptimizedModel:
        """The optimised model, never None: what cannot be optimised runs eager inside it.

        ``example_inputs`` is a tuple or list of positional arguments, a mapping of keyword arguments, or one tensor;
        ``batch_dim`` as in :class:`~pytest_cudagraph.GraphRunner`. ``model_config`` is a mapping or an object: its
        plain settings tell packages in the cache apart, and its ``model_name`` names the model in statistics. The
        same model with the same arguments is compiled once. Leaves the model as it was, to the last bit. Raises
        :class:`~pytest_cudagraph.errors.InputError` for a mode that is not known, and what the model itself raises
        on the example inputs.
        """
        model = model.original if isinstance(model, OptimizedModel) else model
        request = make_request(model, example_inputs, model_config, compilation_mode, batch_dim)
        with self._building:
            entry = self._found(model, request.key)
            served = entry.served if entry else ServedModel(model, request, self._options)
            if not self._is_open:
                served.close()
            elif entry is None or served.can_be_renewed:
                served.build(lambda: self._folder(request.folder_name))
            self._put_last(entry or _Entry(model=reference_to(model), served=served))
        return OptimizedModel(model, served)

    def try_optimized_inference(self, model: Model | str, /, *args: Any, **kwargs: Any) -> InferenceResult:
        """The answer of ``model`` to these arguments, what gave it, and why it was no graph.

        ``model`` is the model itself, what :meth:`compile_model_aot` returned for it, or its name. Of a model that was
        compiled several times, the last one counts. Raises what the model raises, and
        :class:`~pytest_cudagraph.errors.InputError` for a name that no living model has.
        """
        if isinstance(model, OptimizedModel):
            return model.infer(*args, **kwargs)
        entry = self._named(model) if isinstance(model, str) else self._found(model)
        held = entry.model() if entry else None
        if entry is not None and held is not None:
            return entry.served.answer(held, args, kwargs)
        if isinstance(model, str):
            raise InputError(f"no model is named {model!r}; there are: {self._names()}")
        with torch.inference_mode():
            output = model(*args, **kwargs)
        with self._lock:
            self._others.count("eager", Fallback.UNKNOWN_MODEL.value)
        return InferenceResult(output=output, path="eager", reason=Fallback.UNKNOWN_MODEL.value)

    def statistics(self) -> CompilerStatistics:
        """What was served until now, by the models that still live; also after :meth:`cleanup`."""
        self._forget_the_dead()
        models = tuple(entry.served.statistics() for entry in self._entries)
        return CompilerStatistics(models=models, unknown=self._others.paths["eager"])

    def cleanup(self) -> None:
        """Release all graphs, compiled code and temporary packages; calls run eager from then on, and say so."""
        with self._building:
            self._is_open = False
            self._forget_the_dead()
            for entry in self._entries:
                entry.served.close()
            if self._own_folder is not None:
                shutil.rmtree(self._own_folder, ignore_errors=True)
                self._own_folder = None

    def __enter__(self) -> IntegratedAOTCompiler:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cleanup()

    def _found(self, model: Model, key: tuple[Any, ...] | None = None) -> _Entry | None:
        """The last entry of a model, or the one of a request."""
        self._forget_the_dead()
        for entry in reversed(self._entries):
            if is_same(model, entry.model()) and key in (None, entry.served.request.key):
                return entry
        return None

    def _put_last(self, entry: _Entry) -> None:
        with self._lock:
            self._entries = (*(each for each in self._entries if each is not entry), entry)

    def _named(self, name: str) -> _Entry | None:
        self._forget_the_dead()
        return next((entry for entry in reversed(self._entries) if entry.served.request.name == name), None)

    def _names(self) -> str:
        return ", ".join(dict.fromkeys(entry.served.request.name for entry in self._entries)) or "none"

    def _forget_the_dead(self) -> None:
        """Release what was made for models that nobody holds any more.

        Here and not in the moment they go: that moment may lie inside a capture, where nothing may be released.
        """
        if all(entry.model() is not None for entry in self._entries):
            return
        with self._lock:
            living = [entry for entry in self._entries if entry.model() is not None]
            dead = [entry for entry in self._entries if not any(entry is each for each in living)]
            self._entries = tuple(living)
        for entry in dead:
            entry.served.close()

    def _folder(self, name: str) -> Path:
        """Where the packages of one set of settings are kept."""
        if self._cache_dir is not None:
            return self._cache_dir / name
        if self._own_folder is None:
            self._own_folder = Path(tempfile.mkdtemp(prefix="pytest-cudagraph-"))
            weakref.finalize(self, shutil.rmtree, self._own_folder, ignore_errors=True)
        return self._own_folder / name
