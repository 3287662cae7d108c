"""The drop-in compiler: optimises several models, finds them by identity and does not keep them alive."""

from __future__ import annotations

import functools
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pytest_cudagraph.child_process import begin_in_forked_child
from pytest_cudagraph.errors import InputError
from pytest_cudagraph.model_watch import is_same, reference_to
from pytest_cudagraph.protocols import Model
from pytest_cudagraph.serving.drop_in_statistics import (
    CompilerStatistics,
    EventLog,
    InferenceResult,
    ModelStatistics,
)
from pytest_cudagraph.serving.request import CompilerOptions, make_request
from pytest_cudagraph.serving.served_model import ServedModel
from pytest_cudagraph.serving.statistics import NoGraphReason
from pytest_cudagraph.units import to_seconds

_RETURN_SELF = frozenset(
    {"eval", "train", "to", "cpu", "cuda", "half", "float", "double", "bfloat16", "type", "requires_grad_", "apply"}
)
"""Methods that return the module; through the handle they return the handle."""


class OptimizedModel:
    """A model that serves its calls from graphs or compiled code where possible, else from itself.

    Calls have the model's signature and run in inference mode. Attributes are the model's: ``handle.config``,
    ``handle.eval()``. Other methods, such as ``generate``, run the model itself. The handle keeps the model alive.
    """

    __slots__ = ("__weakref__", "_model", "_served")

    def __init__(self, model: Model, served: ServedModel) -> None:
        self._model, self._served = model, served

    @property
    def original(self) -> Model:
        """The model itself."""
        return self._model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output; raises what the model raises."""
        return self._served.serve(self._model, args, kwargs).output

    def infer(self, *args: Any, **kwargs: Any) -> InferenceResult:
        """The model's output, with the path that served the call and the reason."""
        return self._served.serve(self._model, args, kwargs)

    def statistics(self) -> ModelStatistics:
        """All calls until now."""
        return self._served.statistics()

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._model, name)
        returns_self = name in _RETURN_SELF and callable(attribute)
        return functools.partial(self._call_method, attribute) if returns_self else attribute

    def __repr__(self) -> str:
        return f"OptimizedModel({self._served.request.name!r}, mode={self._served.request.mode!r})"

    def _call_method(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        returned = method(*args, **kwargs)
        return self if returned is self._model else returned


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    model: Callable[[], Model | None]
    served: ServedModel


def _renew_locks(compiler: IntegratedAOTCompiler) -> None:
    """In a forked child: another thread of the parent may have held them, and does not exist here."""
    compiler._lock, compiler._building = threading.Lock(), threading.RLock()


class IntegratedAOTCompiler:
    """Compiles and captures models for a pipeline, which uses them like its own::

        with create_integrated_compiler(batch_sizes=(1, 2, 4, 8), cache_dir="compiled") as compiler:
            model = compiler.compile_model_aot(model, (tokens,), {"model_name": "ranker"}, "default")
            scores = model(tokens)

    What cannot be optimised runs eager. It is logged once under ``pytest_cudagraph.serving``, counted in
    :meth:`statistics`, and never raised. Safe from any number of threads. ``cache_dir`` keeps ahead-of-time packages
    for later processes; without it, :meth:`cleanup` removes them. ``device`` is ``cuda``, ``cpu``, or ``auto`` for the
    device of the example inputs. ``max_graphs`` limits the graphs of each model. ``compile_timeout_s`` limits the
    compile of one model for all batch sizes; ``max_compilation_time`` is another name of it. Without ``enable_aot``
    nothing is compiled, only captured. Raises :class:`~pytest_cudagraph.errors.InputError` for wrong options.
    """

    def __init__(
        self,
        *,
        enable_cuda_graphs: bool = True,
        batch_sizes: Sequence[int] = (1, 2, 4, 8),
        cache_dir: str | Path | None = None,
        device: str = "auto",
        max_graphs: int | None = None,
        compile_timeout_s: float = 600.0,
        enable_aot: bool = True,
        max_compilation_time: float | None = None,
    ) -> None:
        self._options = CompilerOptions(
            graphs=enable_cuda_graphs,
            batch_sizes=batch_sizes,
            device=device,
            max_graphs=max_graphs,
            compile_timeout_s=compile_timeout_s if max_compilation_time is None else max_compilation_time,
        )
        self._is_compiling = enable_aot
        self._cache_dir = None if cache_dir is None else Path(cache_dir)
        self._own_folder: Path | None = None
        self._entries: tuple[_Entry, ...] = ()  # replaced, never changed: a call reads it without the lock
        self._lock = threading.Lock()  # held briefly: no call waits for a compile
        self._building = threading.RLock()
        begin_in_forked_child(self, _renew_locks)
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
        """Compile and capture a model; never returns None, because the handle runs eager what is not optimised.

        ``example_inputs`` is a tuple or list of positional arguments, a mapping of keyword arguments, or one tensor;
        ``batch_dim`` as in :class:`~pytest_cudagraph.GraphRunner`. ``model_config`` is a mapping or an object. Its
        plain settings distinguish packages in the cache. Its ``model_name`` names the model in statistics. The same
        model with the same arguments is compiled once. The model's state is restored bit by bit. Raises
        :class:`~pytest_cudagraph.errors.InputError` for an unknown mode, and what the model raises on the example
        inputs.
        """
        model = model.original if isinstance(model, OptimizedModel) else model
        request = make_request(model, example_inputs, model_config, compilation_mode, batch_dim)
        if not self._is_compiling:
            request = make_request(model, example_inputs, model_config, "none", batch_dim)
        with self._building:
            entry = self._find(model, request.key)
            served = entry.served if entry else ServedModel(model, request, self._options)
            if not self._is_open:
                served.close()
            elif entry is None or served.can_be_renewed:
                served.build(lambda: self._folder(request.folder_name))
            self._move_last(entry or _Entry(model=reference_to(model), served=served))
        return OptimizedModel(model, served)

    def try_optimized_inference(self, model: Model | str, /, *args: Any, **kwargs: Any) -> InferenceResult:
        """Serve one call: the output, the path that served it, and why no graph did.

        ``model`` is the model itself, its handle of :meth:`compile_model_aot`, or its name. If a model was compiled
        several times, the last request counts. Raises what the model raises, and
        :class:`~pytest_cudagraph.errors.InputError` for a name that no present model has.
        """
        if isinstance(model, OptimizedModel):
            return model.infer(*args, **kwargs)
        entry = self._find_named(model) if isinstance(model, str) else self._find(model)
        held = entry.model() if entry else None
        if entry is not None and held is not None:
            return entry.served.serve(held, args, kwargs)
        if isinstance(model, str):
            raise InputError(f"no model is named {model!r}; there are: {self._names()}")
        with torch.inference_mode():
            output = model(*args, **kwargs)
        with self._lock:
            self._others.count("eager", NoGraphReason.UNKNOWN_MODEL.value)
        return InferenceResult(output=output, path="eager", reason=NoGraphReason.UNKNOWN_MODEL.value)

    def statistics(self) -> CompilerStatistics:
        """All calls until now of the models that still exist; also after :meth:`cleanup`."""
        self._release_deleted()
        models = tuple(entry.served.statistics() for entry in self._entries)
        return CompilerStatistics(models=models, unknown=self._others.paths["eager"])

    def get_enhancement_stats(self) -> dict[str, Any]:
        """:meth:`statistics` as plain data, with the sums of all models. Times in seconds."""
        statistics = self.statistics()
        models = [asdict(model) for model in statistics.models]
        return {
            "total_calls": statistics.calls,
            **{f"{path}_calls": count for path, count in statistics.paths.items()},
            "graph_hit_ratio": statistics.paths["graph"] / statistics.calls if statistics.calls else None,
            "models_compiled": sum(bool(model["compiled_sizes"]) for model in models),
            "compile_seconds": to_seconds(sum(model["compile_ns"] for model in models)),
            "capture_seconds": to_seconds(sum(model["capture_ns"] for model in models)),
            "models": models,
        }

    def cleanup(self) -> None:
        """Release all graphs, compiled code and temporary packages; later calls run eager, with the reason."""
        with self._building:
            self._is_open = False
            self._release_deleted()
            for entry in self._entries:
                entry.served.close()
            if self._own_folder is not None:
                shutil.rmtree(self._own_folder, ignore_errors=True)
                self._own_folder = None

    def __enter__(self) -> IntegratedAOTCompiler:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cleanup()

    def _find(self, model: Model, key: tuple[Any, ...] | None = None) -> _Entry | None:
        """The last entry of a model, or that of a request."""
        self._release_deleted()
        for entry in reversed(self._entries):
            if is_same(model, entry.model()) and key in (None, entry.served.request.key):
                return entry
        return None

    def _move_last(self, entry: _Entry) -> None:
        with self._lock:
            self._entries = (*(each for each in self._entries if each is not entry), entry)

    def _find_named(self, name: str) -> _Entry | None:
        self._release_deleted()
        return next((entry for entry in reversed(self._entries) if entry.served.request.name == name), None)

    def _names(self) -> str:
        return ", ".join(dict.fromkeys(entry.served.request.name for entry in self._entries)) or "none"

    def _release_deleted(self) -> None:
        """Release everything of deleted models. Not at their deletion, which may happen within a capture."""
        if all(entry.model() is not None for entry in self._entries):
            return
        with self._lock:
            living = [entry for entry in self._entries if entry.model() is not None]
            deleted = [entry for entry in self._entries if not any(entry is each for each in living)]
            self._entries = tuple(living)
        for entry in deleted:
            entry.served.close()

    def _folder(self, name: str) -> Path:
        """The folder of the packages of one set of settings."""
        if self._cache_dir is not None:
            return self._cache_dir / name
        if self._own_folder is None:
            self._own_folder = Path(tempfile.mkdtemp(prefix="pytest-cudagraph-"))
            weakref.finalize(self, shutil.rmtree, self._own_folder, ignore_errors=True)
        return self._own_folder / name


def create_integrated_compiler(**options: Any) -> IntegratedAOTCompiler:
    """Create an :class:`IntegratedAOTCompiler`, which has the same arguments."""
    return IntegratedAOTCompiler(**options)
