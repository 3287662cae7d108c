"""What the twin's dispatch modes have in common: they live beside torch.compile without disturbing it."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_HAS_OWN_SWITCH = hasattr(TorchDispatchMode, "ignore_compile_internals")


class QuietMode(TorchDispatchMode):
    """A dispatch mode under which compiled code stays compiled, and which does not import the compiler."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # What torch otherwise wraps round a mode imports the whole compiler, which takes over a second.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Under a mode that says no, one call makes compiled code eager for the rest of the process.
        return True

    @classmethod
    def is_infra_mode(cls) -> bool:
        # How an older torch, which lacks the switch above, is told the same.
        return not _HAS_OWN_SWITCH
