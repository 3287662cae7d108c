"""What a pipeline uses in place of its model."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from pytest_cudagraph.protocols import Model

if TYPE_CHECKING:
    from pytest_cudagraph.integrated.serving import ServedModel
    from pytest_cudagraph.integrated.statistics import InferenceResult, ModelStatistics

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
