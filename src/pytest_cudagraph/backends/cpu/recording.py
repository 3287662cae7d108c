"""Record one call, then restore the state, the random numbers and torch's functions."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from pytest_cudagraph import hazards, pytree
from pytest_cudagraph.backends.cpu.memory import BorrowedMemory, names_of
from pytest_cudagraph.backends.cpu.observers import SeenMemory, open_recorder
from pytest_cudagraph.backends.cpu.tape import Refusals, Tape
from pytest_cudagraph.errors import CaptureRefusal
from pytest_cudagraph.protocols import Model
from pytest_cudagraph.sources import user_frame
from pytest_cudagraph.sources.syntax import is_host, names_host
from pytest_cudagraph.values import Site

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
def as_capturing(refusals: Refusals) -> Iterator[None]:
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
        if refusals.is_active and guard.applies(*args, **kwargs):
            refusals.refuse(guard.text, hazard=guard.hazard, operation=f"{owner}.{guard.name}")
        return original(*args, **kwargs)

    return refuse


def _claiming(refusals: Refusals, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def is_capturing() -> Any:
        # Libraries ask, and take the branch that a capture can hold.
        return refusals.is_active or original()

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


def record(
    model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any], seen: SeenMemory | None = None
) -> tuple[Tape, Any]:
    """Record one call; return its tape, and its output, which is poisoned: a CUDA capture computes nothing either.

    ``seen`` is the memory of earlier calls. New memory that the recording has not made came from where it cannot see.
    Raises the first :class:`~pytest_cudagraph.errors.CaptureRefusal`, also where the model caught it.
    """
    refusals = Refusals()
    names = names_of(model)
    is_known = None if seen is None else lambda key: key in names or seen.has_seen(key)
    tape = Tape(refusals, inputs=pytree.tensors_in((args, kwargs)), borrowed=BorrowedMemory(names), is_known=is_known)
    random = torch.get_rng_state()
    compiled = _compiled_frames()
    try:
        output = _call(model, args, kwargs, tape, refusals)
    except CaptureRefusal as refused:
        if _compiled_frames() != compiled:
            # A compilation saves the random state, which would be named as the reason.
            raise _compile_refusal(refused.site) from refused
        raise
    finally:
        tape.storages.undo()
        torch.set_rng_state(random)
    if _compiled_frames() != compiled:
        raise _compile_refusal(None)
    tape.storages.poison()
    return tape, output


def _call(model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any], tape: Tape, refusals: Refusals) -> Any:
    try:
        with as_capturing(refusals), open_recorder(tape, refusals):
            output = model(*args, **kwargs)
    except Exception as exc:
        # The model may have turned the refusal into another error. The reason is the first refusal.
        if refusals.first is None or exc is refusals.first:
            raise
        raise refusals.first from exc
    if refusals.first is not None:
        raise refusals.first
    return output


def _compile_refusal(site: Site | None) -> CaptureRefusal:
    return CaptureRefusal(hazards.RNG_STATE_TEXT, hazard="control-flow", operation="torch.compile", site=site)


def _compiled_frames() -> int:
    """How many frames torch.compile has looked at in this process; 0 where it is not loaded."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["frames"]["total"])
