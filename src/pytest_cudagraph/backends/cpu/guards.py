"""What the dispatcher cannot see while a call is recorded, and what a capturing process answers.

The functions are replaced on torch itself, for the time of one recording and for the recording thread; a
``TorchFunctionMode`` would see the same, but switches the fast paths of torch's own modules off.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from pytest_cudagraph import hazards
from pytest_cudagraph.backends.cpu.refusals import Refusals
from pytest_cudagraph.sources import user_frame
from pytest_cudagraph.sources.literals import is_host, names_host

_SYNC = hazards.CAPTURE_UNSUPPORTED.text
_SEED = hazards.RNG_STATE_TEXT


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


def _to_host(tensor: Any, *args: Any, **kwargs: Any) -> bool:
    # A device that a variable holds may on a CPU be the model's own; one that is written out is the host.
    if not is_host(kwargs.get("device", args[0] if args else None)):
        return False
    frame = user_frame()
    return frame is not None and names_host(frame, "to")


class _Guard(NamedTuple):
    owner: Any
    name: str
    hazard: str
    text: str
    applies: Callable[..., bool] = _always


def _guards() -> Iterator[_Guard]:
    for name in ("tolist", "numpy", "__array__", "cpu", "__repr__", "__format__", "pin_memory"):
        yield _Guard(torch.Tensor, name, "host-sync", _SYNC)
    yield _Guard(torch.Tensor, "to", "host-sync", _SYNC, _to_host)
    for module in (torch, torch.random):
        for name in ("manual_seed", "seed", "initial_seed", "get_rng_state", "set_rng_state"):
            yield _Guard(module, name, "rng", _SEED)
    for name in ("manual_seed", "manual_seed_all", "seed", "initial_seed", "get_rng_state", "set_rng_state"):
        yield _Guard(torch.cuda, name, "rng", _SEED)
    yield _Guard(torch.cuda, "synchronize", "host-sync", _SYNC)
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None:
        yield _Guard(accelerator, "synchronize", "host-sync", _SYNC)


@contextmanager
def capturing(refusals: Refusals) -> Iterator[None]:
    """Refuse what these functions do, and say that a stream is capturing; everything is put back at the end."""
    with ExitStack() as stack:
        for guard in _guards():
            stack.enter_context(_replaced(guard.owner, guard.name, functools.partial(_refusing, guard, refusals)))
        for module in (torch.cuda, torch.cuda.graphs):
            stack.enter_context(
                _replaced(module, "is_current_stream_capturing", functools.partial(_claiming, refusals))
            )
        yield


def _refusing(guard: _Guard, refusals: Refusals, original: Callable[..., Any]) -> Callable[..., Any]:
    owner = "Tensor" if guard.owner is torch.Tensor else guard.owner.__name__

    @functools.wraps(original)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if refusals.listening and guard.applies(*args, **kwargs):
            refusals.refuse(guard.text, hazard=guard.hazard, operation=f"{owner}.{guard.name}")
        return original(*args, **kwargs)

    return refuse


def _claiming(refusals: Refusals, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def is_capturing() -> Any:
        # Libraries ask, and take the branch that a capture can hold.
        return refusals.listening or original()

    return is_capturing


@contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    inherited = name not in vars(owner)
    original = inspect.getattr_static(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
