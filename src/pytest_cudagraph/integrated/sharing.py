"""A model's contents without the model: graphs must hold what they read, and must not hold the model itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import MethodType

import torch
from torch import nn

from pytest_cudagraph.protocols import Model


def twin_of(model: Model) -> Model:
    """A module with the very attributes of ``model``, weights and flags included, that does not keep it alive.

    Both have one ``__dict__``: what is changed in one is changed in the other. Handed back as it is: a callable that
    is no module, a module with memory outside of its ``__dict__``, and one that would notice the end of its twin.
    """
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        return model
    if _has_slots(type(model)) or hasattr(type(model), "__del__"):
        return model
    twin = nn.Module.__new__(type(model))
    object.__setattr__(twin, "__dict__", model.__dict__)
    return twin


def reference_to(model: Model) -> Callable[[], Model | None]:
    """Gives ``model`` while somebody else holds it, if it is a module; any other callable stays."""
    return weakref.ref(model) if isinstance(model, nn.Module) else lambda: model


def is_same(model: Model, other: Model | None) -> bool:
    """Whether two references are to one model; a bound method is made anew whenever it is looked up."""
    return model is other or (isinstance(model, MethodType) and model == other)


def _has_slots(cls: type) -> bool:
    return any(vars(each).get("__slots__") for each in cls.__mro__)
