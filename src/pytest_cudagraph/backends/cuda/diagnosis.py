"""Which operation CUDA refused: CUDA's own text does not say, so the call runs once more, eagerly and watched."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from pytest_cudagraph.hazards import refusal
from pytest_cudagraph.sources import user_site
from pytest_cudagraph.values import Site

STRAYED = "another-stream"
"""Stands in for the id of a hazard where an operation is legal, but not on the stream it runs on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The first operation of a call that a capture refuses, and the user's line."""

    hazard: str
    operation: str
    site: Site | None


def diagnose(call: Callable[[], object], stream_now: Callable[[], Any]) -> Diagnosis | None:
    """Run ``call`` eagerly and name its first refused operation; None when nothing known is refused.

    An operation that runs on another stream than the call began on (``stream_now`` tells) counts as refused: work that
    a capture does not join, or that waits for work outside of it, is told by CUDA only at the end. Changes state as
    any call does. An older torch cannot watch without switching compiled code off for good: where it has compiled
    anything, nothing is run.
    """
    if not hasattr(TorchDispatchMode, "ignore_compile_internals") and _has_compiled():
        return None
    watch = _FirstRefusal(stream_now)
    try:
        with watch:
            call()
    except Exception:
        # The call's own refusal is already being reported; what this run raises must not hide it.
        return watch.found
    return watch.found


def _has_compiled() -> bool:
    dynamo = sys.modules.get("torch._dynamo.utils")
    # A torch that counts in another way is taken to have compiled.
    return dynamo is not None and bool(getattr(dynamo, "counters", {"frames": True}).get("frames", {}))


class _FirstRefusal(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its hooks untyped
    def __init__(self, stream_now: Callable[[], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Diagnosis | None = None
        self._stream_now, self._stream = stream_now, stream_now()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Without this, one compiled call under the mode would stay eager for the rest of the process.
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self.found is None:
            self.found = self._judge(func, args, kwargs)
        return func(*args, **(kwargs or {}))

    def _judge(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Diagnosis | None:
        refused = refusal(func, args, kwargs)
        if refused is not None:
            return Diagnosis(hazard=refused.id, operation=refused.operation, site=user_site())
        if self._stream_now() == self._stream:
            return None
        return Diagnosis(hazard=STRAYED, operation=str(getattr(func, "overloadpacket", func)), site=user_site())
