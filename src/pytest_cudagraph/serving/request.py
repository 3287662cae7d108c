"""The options of the drop-in compiler, and one request to compile a model."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

import torch

from pytest_cudagraph import inputs, pytree
from pytest_cudagraph.errors import InputError
from pytest_cudagraph.foreign import value_text
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.protocols import Model
from pytest_cudagraph.serving.graph_set import check_max_graphs
from pytest_cudagraph.values import CompileMode

_DEVICES = ("auto", "cuda", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerOptions:
    """Options of the drop-in compiler. Raises :class:`~pytest_cudagraph.errors.InputError` for a wrong value."""

    graphs: bool
    batch_sizes: Sequence[int]
    device: str
    max_graphs: int | None
    compile_timeout_s: float

    def __post_init__(self) -> None:
        inputs.check_sizes(self.batch_sizes)
        if self.device not in _DEVICES:
            raise InputError(f"device is one of {', '.join(_DEVICES)}; found {value_text(self.device)}")
        check_max_graphs(self.max_graphs)
        limit_s = self.compile_timeout_s
        if isinstance(limit_s, bool) or not isinstance(limit_s, int | float) or not 0 < limit_s < math.inf:
            raise InputError(f"compile_timeout_s is a positive number of seconds; found {value_text(limit_s)}")

    def device_for(self, example: Example) -> str:
        """The kind of device to use: with ``auto``, that of the example inputs."""
        if self.device != "auto":
            return self.device
        tensors = pytree.tensors_in((example.args, example.kwargs))
        return tensors[0].device.type if tensors else "cpu"


MODES: Mapping[str, CompileMode] = MappingProxyType(
    {
        "none": "none",
        "eager": "none",
        "default": "inductor",
        "inductor": "inductor",
        # In this mode torch.compile only adds CUDA graphs, and the graph runner captures those.
        "reduce-overhead": "inductor",
        "aot": "aot",
        "aot-inductor": "aot",
    }
)
"""The compilation modes of pipelines, and how each compiles."""

_NAMES = ("model_name", "model_id", "name", "_name_or_path")
"""Keys of a model's name in its settings; the first that is present wins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call of ``compile_model_aot``. Requests with an equal :attr:`key` share the result."""

    name: str
    mode: str
    example: Example
    batch_dim: Any
    settings: str
    """The plain values of the model's settings, as JSON."""
    key: tuple[Any, ...]

    @property
    def compile_mode(self) -> CompileMode:
        """How the mode compiles."""
        return MODES[self.mode]

    @property
    def folder_name(self) -> str:
        """The folder of the packages that are compiled with these settings."""
        return hashlib.sha256(self.settings.encode()).hexdigest()[:16]


def make_request(model: Model, example_inputs: Any, model_config: Any, mode: str, batch_dim: Any) -> Request:
    """The request in the arguments of ``compile_model_aot``; raises :class:`~pytest_cudagraph.errors.InputError`."""
    if mode not in MODES:
        raise InputError(f"compilation_mode is one of {', '.join(MODES)}; found {value_text(mode)}")
    if not callable(model):
        raise InputError(f"the model must be callable; found {type(model).__name__}")
    example = _example(example_inputs)
    settings = json.dumps(_plain(model_config), sort_keys=True)
    return Request(
        name=_name(model_config) or getattr(model, "__name__", type(model).__name__),
        mode=mode,
        example=example,
        batch_dim=batch_dim,
        settings=settings,
        key=(mode, settings, repr(batch_dim), _form(example)),
    )


def _example(inputs_: Any) -> Example:
    """A tuple or list is the positional arguments, a mapping the keyword arguments, anything else one argument."""
    if isinstance(inputs_, Mapping):
        return Example(args=(), kwargs=dict(inputs_))
    # A named tuple is a single argument.
    if type(inputs_) in (tuple, list):
        return Example(args=tuple(inputs_), kwargs={})
    return Example(args=(inputs_,), kwargs={})


def _form(example: Example) -> tuple[str, ...]:
    """Shapes and dtypes of tensors, plain values, identities of other objects."""
    named = pytree.named_leaves((example.args, example.kwargs))
    return tuple(f"{path} {_leaf_text(leaf)}" for path, leaf in named)


def _leaf_text(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{tuple(leaf.shape)} {leaf.dtype} {leaf.device}"
    return f"{type(leaf).__name__} {leaf!r}" if isinstance(leaf, bool | int | float | str | None) else str(id(leaf))


def _name(config: Any) -> str:
    if isinstance(config, str):
        return config
    settings = config if isinstance(config, Mapping) else _attributes(config)
    return next((settings[name] for name in _NAMES if isinstance(settings.get(name), str) and settings[name]), "")


def _attributes(config: Any) -> Mapping[str, Any]:
    return getattr(config, "__dict__", {})


def _plain(value: Any) -> Any:
    """The settings as JSON values. Other objects count by type, because their address differs in each process."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Enum | PurePath | torch.dtype | torch.device):
        return str(value)
    return {"type": type(value).__qualname__, **_shallow(value)}


def _shallow(value: Any) -> dict[str, Any]:
    """The attributes of an object. Objects among them are left out: they may refer back to it."""
    plain = (bool, int, float, str, list, tuple, Mapping, Enum, PurePath, torch.dtype, torch.device, type(None))
    return {name: _plain(each) for name, each in _attributes(value).items() if isinstance(each, plain)}
