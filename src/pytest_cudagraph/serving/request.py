"""What a pipeline asks for: which way of compiling, for which inputs, under which settings."""

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
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.protocols import Model
from pytest_cudagraph.values import CompileMode

_DEVICES = ("auto", "cuda", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Checked when made: raises :class:`~pytest_cudagraph.errors.InputError` for a value that cannot be."""

    graphs: bool
    batch_sizes: Sequence[int]
    device: str
    max_graphs: int | None
    compile_timeout_s: float

    def __post_init__(self) -> None:
        inputs.check_sizes(self.batch_sizes)
        if self.device not in _DEVICES:
            raise InputError(f"device is one of {', '.join(_DEVICES)}; found {self.device!r}")
        if self.max_graphs is not None and (type(self.max_graphs) is not int or self.max_graphs < 1):
            raise InputError(
                f"max_graphs is a positive int, or None for one graph per batch size; found {self.max_graphs!r}"
            )
        limit_s = self.compile_timeout_s
        if isinstance(limit_s, bool) or not isinstance(limit_s, int | float) or not 0 < limit_s < math.inf:
            raise InputError(f"compile_timeout_s is a positive number of seconds; found {limit_s!r}")


MODES: Mapping[str, CompileMode] = MappingProxyType(
    {
        "none": "none",
        "eager": "none",
        "default": "inductor",
        "inductor": "inductor",
        # What torch.compile adds in this mode are CUDA graphs, and the graph runner makes those.
        "reduce-overhead": "inductor",
        "aot": "aot",
        "aot-inductor": "aot",
    }
)
"""The compilation modes that pipelines ask for, and the way of compiling that each stands for."""

_NAMES = ("model_name", "model_id", "name", "_name_or_path")
"""Where a model's settings keep its name, the most telling first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One model's part of a call of ``compile_model_aot``; :attr:`key` is equal for what can share its results."""

    name: str
    mode: str
    example: Example
    batch_dim: Any
    settings: str
    """The plain ones among the model's settings, as JSON."""
    key: tuple[Any, ...]

    @property
    def compile_mode(self) -> CompileMode:
        """What the mode means here."""
        return MODES[self.mode]

    @property
    def folder_name(self) -> str:
        """Of the packages made under these settings."""
        return hashlib.sha256(self.settings.encode()).hexdigest()[:16]


def make_request(model: Model, example_inputs: Any, model_config: Any, mode: str, batch_dim: Any) -> Request:
    """Read the arguments of ``compile_model_aot``; raises :class:`~pytest_cudagraph.errors.InputError`."""
    if mode not in MODES:
        raise InputError(f"compilation_mode is one of {', '.join(MODES)}; found {mode!r}")
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


def _example(given: Any) -> Example:
    """A tuple or list holds positional arguments, a mapping keyword arguments; anything else is one argument."""
    if isinstance(given, Mapping):
        return Example(args=(), kwargs=dict(given))
    # A named tuple is one argument of the model, and no list of them.
    if type(given) in (tuple, list):
        return Example(args=tuple(given), kwargs={})
    return Example(args=(given,), kwargs={})


def _form(example: Example) -> tuple[str, ...]:
    """Shapes and dtypes of tensors, plain values as they are, other objects by identity."""
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
    """Settings as JSON takes them. An object that is no setting counts by its type, for its address never repeats."""
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
    """The attributes of an object, without objects of their own: those may lead back to it."""
    plain = (bool, int, float, str, list, tuple, Mapping, Enum, PurePath, torch.dtype, torch.device, type(None))
    return {name: _plain(each) for name, each in _attributes(value).items() if isinstance(each, plain)}
