"""The dispatch mode that sees every operation of one call."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass_type

from pytest_cudagraph import hazards
from pytest_cudagraph.backends.cpu.modes import QuietMode
from pytest_cudagraph.backends.cpu.refusals import Refusals
from pytest_cudagraph.backends.cpu.tape import Region, Tape

_DENSE_KEY = torch._C.DispatchKey.CompositeExplicitAutograd

# Outside of torch's own conditional graphs these let the host decide, by reading a tensor.
_READS_ITS_CONDITION = frozenset({"cond", "while_loop"})

# The plain form of most others refuses to run under a dispatch mode.
_KNOWN_PARTS = frozenset({"flex_attention"})


class Recorder(QuietMode):
    """Writes what one call dispatches to a tape, and refuses what a CUDA capture refuses."""

    supports_higher_order_operators = True

    def __init__(self, tape: Tape, refusals: Refusals) -> None:
        super().__init__()
        self._tape = tape
        self._refusals = refusals

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._record(func, types, args, kwargs or {})

    def record_region(self, region: Region, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Compiled code that was called during the recording."""
        self._refusals.check()
        # Called from outside the dispatcher, so the recorder must be told not to record its own work.
        with self._refusals.deaf(), _disable_current_modes():
            return self._tape.record_region(region, args, kwargs)

    def _record(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._refusals.check()
        if any(is_traceable_wrapper_subclass_type(cls) for cls in types):
            return NotImplemented  # torch then asks the subclass, whose inner operations come here
        found = hazards.refusal(func, args, kwargs, from_host=self._tape.is_number)
        if found is not None:
            self._refusals.refuse(found.text, hazard=found.id, operation=found.operation)
        if isinstance(func, torch._ops.OpOverload):
            with self._refusals.deaf():
                return self._tape.record(func, args, kwargs)
        return self._record_parts(func, args, kwargs)

    def _record_parts(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A higher-order operator by what its plain form dispatches."""
        name = func.name()
        if name in _READS_ITS_CONDITION:
            self._refusals.refuse(hazards.CAPTURE_UNSUPPORTED.text, hazard="host-sync", operation=name)
        if name not in _KNOWN_PARTS:
            text = "the CPU twin does not know the parts of this operator"
            self._refusals.refuse(text, hazard="unknown-op", operation=name)
        with self:
            return func.py_kernels[_DENSE_KEY](*args, **kwargs)


class _RecorderBesideDynamo(Recorder):
    """The same where the compiler is loaded: it must not try to compile the recorder's own frames."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._record(func, types, args, kwargs or {})


def open_recorder(tape: Tape, refusals: Refusals) -> Recorder:
    """The recorder for this process as it is now."""
    recorder = _RecorderBesideDynamo if "torch._dynamo" in sys.modules else Recorder
    return recorder(tape, refusals)
