"""Composite operators by their parts, where that leaves a single kernel: its views then need no replay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pytest_cudagraph import hazards
from pytest_cudagraph.backends.cpu.lowering import Operation
from pytest_cudagraph.backends.cpu.modes import QuietMode
from pytest_cudagraph.backends.cpu.results import fresh_results
from pytest_cudagraph.backends.cpu.traits import Traits, traits_of


class _Abandoned(Exception):
    """The parts are more than one kernel, or have effects that must not happen twice."""


class Trial(QuietMode):
    """Runs the parts of one composite; stops before the second kernel and before any effect."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel: Operation | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        traits = _harmless(func, args, kwargs)
        if traits.composite is not None:
            with self:
                return traits.composite(*args, **kwargs)
        if self.kernel is not None and not func.is_view:
            raise _Abandoned
        result = func(*args, **kwargs)
        fresh = fresh_results(result, args, kwargs)
        if fresh:
            if self.kernel is not None:
                raise _Abandoned
            self.kernel = Operation(func=func, args=args, kwargs=kwargs, result=result, fresh=fresh)
        return result


def run_by_parts(traits: Traits, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Operation] | None:
    """The result and the only kernel of a composite; None where it has several, none, or effects."""
    if traits.composite is None or traits.random or traits.written(args, kwargs):
        return None
    trial = Trial()
    try:
        with trial:
            result = traits.composite(*args, **kwargs)
    except _Abandoned:
        return None
    return None if trial.kernel is None else (result, trial.kernel)


def _harmless(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Traits:
    if not isinstance(func, torch._ops.OpOverload):
        raise _Abandoned
    traits = traits_of(func)
    if traits.random or traits.allocates or traits.metadata_only or traits.lifts or traits.written(args, kwargs):
        raise _Abandoned
    if hazards.refusal(func, args, kwargs) is not None:
        raise _Abandoned
    return traits
