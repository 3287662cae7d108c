"""The static inputs of the twin: the common ones, with a short way for calls without nesting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pytest_cudagraph import leaves
from pytest_cudagraph.backends.static_inputs import StaticInputs

# Compared by value without surprises; anything else goes the long way.
_PLAIN = (type(None), bool, int, str, torch.dtype)


class CpuInputs(StaticInputs):
    """Static inputs; small models would spend half a replay on flattening their arguments, hence the short way."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        super().__init__(args, kwargs)
        self._count, self._names = len(args), tuple(kwargs)
        values = [*self.args, *(self.kwargs[name] for name in self._names)]
        self._short = all(isinstance(value, torch.Tensor) or type(value) in _PLAIN for value in values)
        self._targets = [
            (i, v, v.shape, v.dtype, v.device) for i, v in enumerate(values) if isinstance(v, torch.Tensor)
        ]
        self._baked = [(i, v) for i, v in enumerate(values) if not isinstance(v, torch.Tensor)]

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The buffers in containers of their own: a model that takes items out of a dict finds them all next time."""
        args, kwargs = leaves.map_tensors(lambda tensor: tensor, (self.args, self.kwargs))
        return args, kwargs

    def load(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """As ``copy_in``, in inference mode only."""
        values = self._in_order(args, kwargs)
        if values is None or not self._fit(values):
            __tracebackhide__ = True
            self.copy_in(args, kwargs)  # which also has the words for what does not fit
            return
        for at, target, *_ in self._targets:
            target.copy_(values[at])

    def _in_order(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        if not self._short or len(args) != self._count or len(kwargs) != len(self._names):
            return None
        if not kwargs:
            return args
        if not all(name in kwargs for name in self._names):
            return None
        return (*args, *[kwargs[name] for name in self._names])

    def _fit(self, values: tuple[Any, ...]) -> bool:
        for at, _, shape, dtype, device in self._targets:
            given = values[at]
            if not isinstance(given, torch.Tensor):
                return False
            if given.shape != shape or given.dtype is not dtype or given.device != device:
                return False
        return all(type(values[at]) is type(baked) and values[at] == baked for at, baked in self._baked)
