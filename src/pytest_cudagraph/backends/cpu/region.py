"""Compiled code: one opaque step of the tape, whose executions are counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from pytest_cudagraph.backends.cpu.recorder import Recorder
from pytest_cudagraph.backends.cpu.witness import Witness


class CpuRegion:
    """Wraps compiled code; see :class:`~pytest_cudagraph.protocols.CompiledRegion`."""

    def __init__(self, call: Callable[..., Any], label: str) -> None:
        self._call = call
        self._executions = 0
        self.label = label
        # AOTAutograd asks whether the code takes its inputs as one list, which it then empties.
        self._boxed_call = getattr(call, "_boxed_call", False)

    @property
    def executions(self) -> int:
        """How often the code ran for its effect; the run that a recording makes does not count."""
        return self._executions

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        watching = _watching()
        if isinstance(watching, Recorder):
            return watching.record_region(self, args, kwargs)
        if watching is not None:
            watching.see((args, kwargs))
        return self.execute(*args, **kwargs)

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        """Run and count."""
        self._executions += 1
        return self._call(*args, **kwargs)

    def execute_uncounted(self, *args: Any, **kwargs: Any) -> Any:
        """Run for a recording."""
        return self._call(*args, **kwargs)


def _watching() -> Recorder | Witness | None:
    if torch._C._len_torch_dispatch_stack() == 0:  # the usual case, in timed code
        return None
    modes = _get_current_dispatch_mode_stack()
    return next((mode for mode in reversed(modes) if isinstance(mode, (Recorder, Witness))), None)
