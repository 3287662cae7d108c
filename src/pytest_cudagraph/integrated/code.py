"""Compiled code of one model: for which calls it was made, and whether it still is the code of that model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from pytest_cudagraph.compile import Compiled
from pytest_cudagraph.protocols import Model
from pytest_cudagraph.runner.calls import CallForm
from pytest_cudagraph.runner.watch import ModelWatch
from pytest_cudagraph.state import modules_of


class CompiledCode:
    """The batch sizes whose compiled code has been proven, and a watch on the model it was compiled from."""

    def __init__(self, compiled: Compiled, sizes: Collection[int], model: Model, form: CallForm, device: str) -> None:
        self.sizes = tuple(sorted(sizes))
        self._compiled, self._form, self._serves = compiled, form, True
        self._device_type = torch.device(device).type
        self._autocast = self._autocast_now()
        self._watch = ModelWatch(model)
        # A package has its own copy of the weights; other compiled code reads those of the model.
        self._copied = _tensors(model) if compiled.mode == "aot" else []
        self._versions = _versions(self._copied)

    def call_for(self, size: int) -> Model | None:
        """What runs at one batch size; None where there is no proven code."""
        return self._compiled.call_for(size) if size in self.sizes else None

    def fitting(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Model | None:
        """What was compiled for exactly such a call: form, batch size and autocast; None where nothing was."""
        if not self._serves or self._autocast_now() != self._autocast:
            return None
        rows = self._form.read(args, kwargs, self.sizes[-1])[1]
        return self.call_for(rows) if isinstance(rows, int) else None

    def has_old_weights(self) -> bool:
        """Whether weights that the code has copied were written since; 0.1 µs for each, so asked before every call."""
        return _versions(self._copied) != self._versions

    def stop_serving(self) -> None:
        """Fit no call any more; graphs may still be captured from it."""
        self._serves = False

    def look_anew(self) -> None:
        """Take the weights as they are for those that the code has: they were written to, and put back."""
        self._versions = _versions(self._copied)

    def is_outdated(self) -> bool:
        """Whether the model is another one than the code was compiled from."""
        return self.has_old_weights() or self._watch.has_changed()

    def close(self) -> None:
        """Release the code."""
        self._compiled.close()

    def _autocast_now(self) -> torch.dtype | None:
        enabled = torch.is_autocast_enabled(self._device_type)
        return torch.get_autocast_dtype(self._device_type) if enabled else None


def _tensors(model: Model) -> list[torch.Tensor]:
    held = [tensor for module in modules_of(model) for tensor in (*module.parameters(), *module.buffers())]
    return [tensor for tensor in held if not tensor.is_inference()]  # those count no versions


def _versions(tensors: list[torch.Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]
