"""Which operation CUDA refused: CUDA's own text does not say, so the call runs once more, eagerly and watched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from pytest_cudagraph.hazards import refusal
from pytest_cudagraph.sources import user_site
from pytest_cudagraph.values import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The first operation of a call that a capture refuses, and the user's line."""

    hazard: str
    operation: str
    site: Site | None


def diagnose(call: Callable[[], object]) -> Diagnosis | None:
    """Run ``call`` eagerly and name its first refused operation; None when the catalogue knows of none.

    Changes state as any call does. An older torch cannot watch without switching compiled code off for good: there
    nothing is run.
    """
    if not hasattr(TorchDispatchMode, "ignore_compile_internals"):
        return None
    watch = _FirstRefusal()
    try:
        with watch:
            call()
    except Exception:
        # The call's own refusal is already being reported; what this run raises must not hide it.
        return watch.found
    return watch.found


class _FirstRefusal(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its hooks untyped
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Diagnosis | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Without this, one compiled call under the mode would stay eager for the rest of the process.
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self.found is None:
            refused = refusal(func, args, kwargs)
            if refused is not None:
                self.found = Diagnosis(hazard=refused.id, operation=refused.operation, site=user_site())
        return func(*args, **(kwargs or {}))
