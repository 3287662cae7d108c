"""Dispatch modes that observe a call, and the tensors that an operation works on."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any, TypeVar, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_HAS_OWN_SWITCH = hasattr(TorchDispatchMode, "ignore_compile_internals")


class ObservingMode(TorchDispatchMode):
    """A dispatch mode that leaves compiled code compiled and does not import the compiler."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch wraps the mode, and that imports the compiler, which takes over a second.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Otherwise one call under the mode makes compiled code eager for the rest of the process.
        return True

    @classmethod
    def is_infra_mode(cls) -> bool:
        # The same for an older torch, which lacks the switch above.
        return not _HAS_OWN_SWITCH


_Mode = TypeVar("_Mode", bound=ObservingMode)


def hidden_from_compiler(kind: type[_Mode]) -> type[_Mode]:
    """The class to use in this process: where torch.compile is loaded, one whose frames it does not compile."""
    return _hidden(cast("Any", kind)) if "torch._dynamo" in sys.modules else kind


@functools.cache
def _hidden(kind: type) -> Any:
    # torch wraps only a method that the class itself defines.
    own = {"__torch_dispatch__": vars(kind)["__torch_dispatch__"], "_should_skip_dynamo": classmethod(lambda cls: True)}
    return type(kind.__name__, (kind,), own)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in an operator's arguments or results."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))


def storage_key(tensor: torch.Tensor) -> int | None:
    """The identity of a tensor's storage, or None for layouts that have none (sparse, oneDNN)."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # torch has no other way to ask
        return None
