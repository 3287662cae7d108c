"""Detect that a model has changed since its capture, and refer to a model without keeping it alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from itertools import chain, compress
from operator import attrgetter, itemgetter
from types import MethodType
from typing import Any

import torch
from torch import nn

from pytest_cudagraph.protocols import Model
from pytest_cudagraph.state import modules_of
from pytest_cudagraph.state.storages import is_addressable

_MAX_NAMED = 3
_flag_in = itemgetter("training")
_flag_of = attrgetter("training")
_address_of = torch._C.TensorBase.data_ptr
_strides_of = torch._C.TensorBase.stride
# With the strides it replaces the shape, which would create an object per tensor and call.
_numel_of = torch._C.TensorBase.numel
_dtype_of = attrgetter("dtype")
_equals_of = attrgetter("__eq__")
_flat = chain.from_iterable


class ModelWatch:
    """Watches parameters, buffers, submodules and training flags of every module that a callable holds.

    :meth:`has_changed` runs before every replay. To be fast, it visits no module and looks up no name. It reads live
    views of the modules' own tables, and compares flat lists in C.
    """

    def __init__(self, model: Model) -> None:
        self._modules = _all_modules(model)
        # A module's table is read faster than its attribute. A ScriptModule has its flag in C++.
        self._flag_tables = [vars(module) for module in self._modules if "training" in vars(module)]
        self._scripted = [module for module in self._modules if "training" not in vars(module)]
        self._flags, self._scripted_flags = self._flags_now()
        self._tables = _views(self._modules)
        self._entries = list(_flat(self._tables))
        self._has_equals = list(map(_has_equals, self._entries))
        self._ids = list(map(id, compress(self._entries, self._has_equals)))
        # Each once: the quick check takes a tensor that occurs twice for another model.
        self._held = list({id(entry): entry for entry in self._entries if _is_plain(entry)}.values())
        self._addresses, self._strides = list(map(_address_of, self._held)), list(map(_strides_of, self._held))
        self._numels, self._dtypes = list(map(_numel_of, self._held)), list(map(_dtype_of, self._held))
        self._has_same_forms = _quick_check(self._held)
        # Keeps the memory, so that new weights do not get the address of old ones.
        self._aliases = [tensor.detach() for tensor in self._held]
        self._model, self._facts = model, _facts(model)

    def has_changed(self) -> bool:
        """Whether an earlier graph would read other memory, or run in another mode, than eager now.

        Values written in place are no change. ``benchmarks/runner_overhead.py`` shows the time it takes.
        """
        try:
            return not (
                self._has_same_entries()
                and list(map(_address_of, self._held)) == self._addresses
                and (self._has_same_forms(*self._held) or self._compare_forms())
                and list(map(_flag_in, self._flag_tables)) == self._flags
                and (not self._scripted or self._flags_now()[1] == self._scripted_flags)
            )
        except (TypeError, ValueError, RuntimeError, AttributeError, KeyError):  # gone, without address, other shape
            return True

    def _has_same_entries(self) -> bool:
        """Whether the tables hold the same objects as at first.

        ``==`` of lists is the fastest comparison, because it looks at identities first. Then it raises for two tensors
        of several elements. Another object can be equal only to the few that are compared by identity before.
        """
        entries = list(_flat(self._tables))
        if self._ids and list(map(id, compress(entries, self._has_equals))) != self._ids:
            return False
        return entries == self._entries

    def changes(self) -> list[str]:
        """What has changed, in words: ``buffer cache was replaced: it is in other memory``. At most three changes."""
        now = _facts(self._model)
        gone = [f"{name} is gone" for name in self._facts if name not in now]
        new = [f"{name} is new" for name in now if name not in self._facts]
        both = [(name, fact, now[name]) for name, fact in self._facts.items() if name in now]
        changed = [f"{name} {_difference(before, after)}" for name, before, after in both if before != after]
        texts = [*changed, *gone, *new]
        return texts if len(texts) <= _MAX_NAMED else [*texts[:_MAX_NAMED], f"{len(texts) - _MAX_NAMED} more changes"]

    def _compare_forms(self) -> bool:
        """Decides where the quick check says no, as it does in another mode."""
        return (
            list(map(_strides_of, self._held)) == self._strides
            and list(map(_numel_of, self._held)) == self._numels
            and list(map(_dtype_of, self._held)) == self._dtypes
        )

    def _flags_now(self) -> tuple[list[bool], list[bool]]:
        return list(map(_flag_in, self._flag_tables)), list(map(_flag_of, self._scripted))


def _quick_check(held: list[torch.Tensor]) -> Callable[..., bool]:
    """A check that sizes, strides and dtypes are unchanged, in one call of C++ (the guards of torch.compile).

    It is created in inference mode, in which calls run. Only its yes is reliable. Without these guards it says no.
    """
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    if guards is None or not held:
        return lambda *tensors: False
    sizes, strides = [list(each.shape) for each in held], [list(each.stride()) for each in held]
    with torch._C._InferenceMode(True):
        made = guards.TensorGuards(*held, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Callable[..., bool] = made.check
    return check


def _facts(model: Model) -> dict[str, Any]:
    """What the watch compares, by name. Addresses and ids are unique, because the watch keeps the objects alive."""
    facts: dict[str, Any] = {}
    for outer in modules_of(model):
        for prefix, module in outer.named_modules():
            inner = f"{prefix}." if prefix else ""
            facts[f"the training flag of {prefix or 'the model'}"] = module.training
            facts.update({f"module {inner}{name}": id(child) for name, child in module._modules.items()})
            for kind, table in (("parameter", module._parameters), ("buffer", module._buffers)):
                facts.update({f"{kind} {inner}{name}": _tensor_facts(entry) for name, entry in table.items()})
    return facts


def _tensor_facts(entry: Any) -> Any:
    if not _is_plain(entry):
        return id(entry)
    return entry.data_ptr(), tuple(entry.shape), entry.dtype, entry.stride()


def _difference(before: Any, after: Any) -> str:
    if isinstance(after, bool):
        return f"was {before} and is {after}"
    if not isinstance(before, tuple) or not isinstance(after, tuple):
        return "is another object"
    if before[1:3] != after[1:3]:
        texts = [f"{str(dtype).removeprefix('torch.')} {shape}" for _, shape, dtype, _ in (before, after)]
        return f"was {texts[0]} and is {texts[1]}"
    return "was replaced: it is in other memory" if before[0] != after[0] else "has other strides"


def _all_modules(model: Model) -> list[nn.Module]:
    modules = {id(module): module for outer in modules_of(model) for module in outer.modules()}
    return list(modules.values())


def _views(modules: list[nn.Module]) -> list[Iterable[Any]]:
    """Live views of the tables. Those of a ScriptModule are in C++, where nothing replaces their entries."""
    tables = [vars(module).get(name) for module in modules for name in ("_parameters", "_buffers", "_modules")]
    return [dict.values(table) for table in tables if isinstance(table, dict) and table]


def _has_equals(entry: Any) -> bool:
    """Whether ``==`` may call another object equal to this entry of a table."""
    if isinstance(entry, torch.Tensor):
        return _equals_of(type(entry)) is not _equals_of(torch.Tensor) or not _is_plain(entry) or entry.numel() == 1
    return entry is not None and _equals_of(type(entry)) is not _equals_of(object)


def _is_plain(entry: Any) -> bool:
    return isinstance(entry, torch.Tensor) and is_addressable(entry)


def weak_alias(model: Model) -> Model:
    """A module that shares the ``__dict__`` of ``model``, with its weights and flags, and does not keep it alive.

    Returns ``model`` itself for a callable that is no module, for a module with memory outside its ``__dict__``, and
    for one with a ``__del__``.
    """
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        return model
    if _has_slots(type(model)) or hasattr(type(model), "__del__"):
        return model
    alias = nn.Module.__new__(type(model))
    object.__setattr__(alias, "__dict__", model.__dict__)
    return alias


def reference_to(model: Model) -> Callable[[], Model | None]:
    """A function that returns ``model``, or None after its deletion. Only modules are referenced weakly."""
    return weakref.ref(model) if isinstance(model, nn.Module) else lambda: model


def is_same(model: Model, other: Model | None) -> bool:
    """Whether two references mean one model. Each lookup of a bound method creates a new object."""
    return model is other or (isinstance(model, MethodType) and model == other)


def _has_slots(cls: type) -> bool:
    return any(vars(each).get("__slots__") for each in cls.__mro__)
