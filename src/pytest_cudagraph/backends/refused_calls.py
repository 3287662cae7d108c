"""The Python functions of torch that a capture refuses, and how to replace functions of torch for a while.

The dispatcher does not show these calls. A ``TorchFunctionMode`` would, but it switches fused fast paths off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from pytest_cudagraph.hazards import CAPTURE_UNSUPPORTED, RNG_STATE_TEXT
from pytest_cudagraph.sources import user_frame
from pytest_cudagraph.sources.syntax import is_host, names_host

_READS = ("tolist", "numpy", "__array__", "cpu", "__repr__", "__format__")
_SEEDS = ("manual_seed", "seed")
_STATES = ("initial_seed", "get_rng_state", "set_rng_state")


class RefusedCall(NamedTuple):
    """One function that a capture refuses, with the id of its hazard and the text of CUDA or PyTorch."""

    owner: Any
    owner_name: str
    name: str
    hazard: str = "host-sync"
    text: str = CAPTURE_UNSUPPORTED.text
    is_legal_on_host: bool = False
    """Whether the call is legal unless its first argument is a tensor on the device."""

    @property
    def label(self) -> str:
        """``Tensor.numpy``, ``torch.manual_seed``."""
        return f"{self.owner_name}.{self.name}"


def refused_calls() -> Iterator[RefusedCall]:
    """The functions that this version of torch has. ``Tensor.to`` is refused only for :func:`moves_to_host`."""
    for name in (*_READS, "to"):
        yield RefusedCall(torch.Tensor, "Tensor", name, is_legal_on_host=True)
    yield RefusedCall(torch.Tensor, "Tensor", "pin_memory")
    for module, label in ((torch, "torch"), (torch.random, "torch.random"), (torch.cuda, "torch.cuda")):
        is_host = module is not torch.cuda
        for name in (*_SEEDS, *_STATES, *(() if is_host else ("manual_seed_all", "seed_all"))):
            yield RefusedCall(module, label, name, "rng", RNG_STATE_TEXT, is_host and name in _STATES)
    yield RefusedCall(torch.cuda, "torch.cuda", "synchronize")
    if hasattr(torch, "accelerator"):
        yield RefusedCall(torch.accelerator, "torch.accelerator", "synchronize")
    for owner in (torch.cuda.Event, torch.cuda.Stream):
        for name in ("synchronize", "query"):
            if hasattr(owner, name):
                yield RefusedCall(owner, f"torch.cuda.{owner.__name__}", name)


def moves_to_host(args: tuple[Any, ...], kwargs: dict[str, Any], *, by_name: bool) -> bool:
    """Whether ``Tensor.to(*args, **kwargs)`` asks for the CPU. ``by_name``: only if the source names it."""
    if not any(map(is_host, (*args[1:2], kwargs.get("device")))):
        return False
    # On a CPU a variable may hold the model's own device.
    return not by_name or names_host(user_frame(), "to")


Replacement = tuple[Any, str, Callable[[Any], Any]]
"""An object, the name of its attribute, and a function from the attribute to its replacement."""

_MISSING = object()


@contextmanager
def replaced(replacements: Iterable[Replacement]) -> Iterator[None]:
    """Replace attributes, and put every one of them back at the end, also after an exception."""
    with ExitStack() as stack:
        for owner, name, make in replacements:
            stack.callback(_put_back, owner, name, vars(owner).get(name, _MISSING))
            setattr(owner, name, make(getattr(owner, name)))
        yield


def _put_back(owner: Any, name: str, own: Any) -> None:
    if own is _MISSING:
        delattr(owner, name)  # the attribute of the base class shows again
    else:
        setattr(owner, name, own)


def claims_capture(is_capturing: Callable[[], bool] = lambda: True) -> Iterator[Replacement]:
    """Let libraries that ask ``torch.cuda.is_current_stream_capturing`` take the branch they take under capture."""

    def claiming(original: Callable[[], bool]) -> Callable[[], bool]:
        return functools.wraps(original)(lambda: is_capturing() or original())

    for module in (torch.cuda, torch.cuda.graphs):
        yield module, "is_current_stream_capturing", claiming
