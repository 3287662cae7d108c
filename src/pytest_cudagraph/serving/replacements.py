"""A watch whose cost does not grow with the model: ``GraphRunner(watch="hooks")``.

While it is used, the places of torch through which a module's weights are replaced are wrapped for the whole process.
They tell of each replacement. A look at each weight follows only then, and every 10 ms for what
goes past these places.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pytest_cudagraph.units import NS_PER_S

_LOOK_EVERY_NS = 0.01 * NS_PER_S

_TABLES = ("_parameters", "_buffers", "_modules")
_NUMBERS = frozenset({bool, int, float, str})
"""A module takes none of these for a weight, which makes most assignments fast."""


class Replacements:
    """Says when a look at the weights is due: after a replacement anywhere in the process, and every 10 ms.

    Told at once: what goes through an attribute of a module (``module.weight = ...``, ``del``, ``train()``,
    ``load_state_dict(assign=True)``, ``.to(...)``, ``register_buffer``), ``parameter.data = ...``,
    ``parameter.set_(...)`` and ``torch.utils.swap_tensors``. Not told, and so seen within 10 ms: what writes a module's
    tables itself (``module._parameters["weight"] = ...``), the memory of a buffer (``buffer.data = ...``) or the
    strides in place (``t_()``). Until then a graph serves the old weights. A storage that is freed
    (``untyped_storage().resize_(0)``, as some sharding does) is read until then, too.
    """

    def __init__(self, now_ns: Callable[[], float] = time.perf_counter_ns) -> None:
        self._now_ns = now_ns
        self._latest: object | None = None
        self._seen: object | None = None
        self._look_at_ns = 0.0
        _PLACES.wrap()
        self.close = weakref.finalize(self, _PLACES.unwrap)
        """Stop listening. A second call does nothing. The last one takes the wrappers away."""

    def is_due(self) -> bool:
        """Whether to look at the weights now, and then to call :meth:`found_none` or to drop the graphs."""
        self._latest = _PLACES.latest
        return self._latest is not self._seen or self._now_ns() >= self._look_at_ns

    def found_none(self) -> None:
        """No weight was replaced, as of the last :meth:`is_due`. A replacement since then makes the next look due."""
        self._seen, self._look_at_ns = self._latest, self._now_ns() + _LOOK_EVERY_NS


class _Places:
    """Where torch replaces weights, wrapped as long as somebody listens."""

    def __init__(self) -> None:
        self.latest = object()
        """A new object at each replacement: threads cannot lose one, as they could lose an increment."""
        # Re-entrant, because a garbage collection inside of it may end another one.
        self._lock, self._listeners = threading.RLock(), 0
        self._wrapped: list[tuple[Any, str, Any, Any]] = []

    def wrap(self) -> None:
        """For one more listener."""
        with self._lock:
            self._listeners += 1
            if self._listeners == 1 and not self._wrapped:
                self._wrap_all()

    def unwrap(self) -> None:
        """For one listener less. A place that other code has wrapped again stays as it is."""
        with self._lock:
            self._listeners -= 1
            if self._listeners:
                return
            while self._wrapped:
                owner, name, original, wrapper = self._wrapped.pop()
                if vars(owner).get(name) is not wrapper:
                    continue
                if original is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)

    def _wrap_all(self) -> None:
        for name in ("__delattr__", "register_buffer", "register_parameter", "add_module", "_apply"):
            self._replace(nn.Module, name, self._telling(getattr(nn.Module, name)))
        self._replace(nn.Module, "__setattr__", self._telling_setattr(nn.Module.__setattr__))
        self._replace(nn.Parameter, "set_", self._telling(torch.Tensor.set_))
        self._replace(nn.Parameter, "data", _TellingData(self))
        self._replace(torch.utils, "swap_tensors", self._telling(torch.utils.swap_tensors))

    def _replace(self, owner: Any, name: str, wrapper: Any) -> None:
        self._wrapped.append((owner, name, vars(owner).get(name), wrapper))
        setattr(owner, name, wrapper)

    def _telling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:  # afterwards: a look before it would find the old weights, and the next call none
                self.latest = object()

        return replaced

    def _telling_setattr(self, original: Callable[[nn.Module, str, Any], None]) -> Callable[..., None]:
        @functools.wraps(original)
        def assigned(module: nn.Module, name: str, value: Any) -> None:
            try:
                original(module, name, value)
            finally:
                if name == "training" or (type(value) not in _NUMBERS and _may_be_weight(module, name, value)):
                    self.latest = object()

        return assigned


class _TellingData:
    """``parameter.data``, which tells of an assignment."""

    def __init__(self, places: _Places) -> None:
        self._places = places
        self._data: Any = torch._C.TensorBase.data
        self.__doc__ = self._data.__doc__

    def __get__(self, parameter: Any, owner: Any = None) -> Any:
        return self if parameter is None else self._data.__get__(parameter)

    def __set__(self, parameter: Any, value: Any) -> None:
        try:
            self._data.__set__(parameter, value)
        finally:
            self._places.latest = object()


def _may_be_weight(module: nn.Module, name: str, value: Any) -> bool:
    """Whether a module keeps this attribute in its tables. A model may assign plain ones in each call."""
    held = vars(module)
    tables = [held.get(table, ()) for table in _TABLES]
    return isinstance(value, nn.Parameter | nn.Module) or name in _TABLES or any(name in table for table in tables)


_PLACES = _Places()
"""The places belong to the process, and so does what wraps them. It changes nothing while nobody listens."""
