"""Whether a call writes large parameters. If not, a capture need not copy them to restore them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from pytest_cudagraph import inputs
from pytest_cudagraph.audit.observer import observing
from pytest_cudagraph.audit.rule_checks import Operators
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.inputs.example import opaque_arguments
from pytest_cudagraph.protocols import Backend, Model
from pytest_cudagraph.state import Constants, Undo


class _WritesParameterError(Exception):
    """Ends a call before it writes to a parameter that nobody has copied."""


class _WriteGuard:
    """Runs operations, but none that writes to one of the parameters."""

    def __init__(self, constants: Constants) -> None:
        self._constants, self._operators = constants, Operators()
        self.is_safe = True

    def run(self, func: Any, types: tuple[type, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of ``func(*args, **kwargs)``. Raises :class:`_WritesParameterError` instead of a write."""
        if any(map(self._is_constant, self._operators.of(func).written(args, kwargs))):
            self.is_safe = False
            raise _WritesParameterError
        return func(*args, **kwargs)

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        return tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() in self._constants


def writes_parameters(model: Model, example: Example, backend: Backend) -> bool:
    """Whether an eager call on ``example`` writes large parameters. The model and the generators stay as they were."""
    constants = Constants.take(model)
    if not constants:
        return False
    undo, guard = Undo(model, backend, extras=opaque_arguments([example]), constants=constants), _WriteGuard(constants)
    # Whatever the model raises here, it raises in the capture too.
    with suppress(Exception), undo.undone():
        given = inputs.clone(example)
        with backend.running(), observing(guard.run):
            model(*given.args, **given.kwargs)
    return not guard.is_safe
