"""Record one call, then restore the state, the random numbers and torch's functions."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from pytest_cudagraph import hazards, pytree
from pytest_cudagraph.backends.cpu.memory import BorrowedMemory, names_of
from pytest_cudagraph.backends.cpu.observers import SeenMemory, open_recorder
from pytest_cudagraph.backends.cpu.tape import Refusals, Tape
from pytest_cudagraph.backends.refused_calls import RefusedCall, claims_capture, moves_to_host, refused_calls, replaced
from pytest_cudagraph.errors import CaptureRefusal
from pytest_cudagraph.protocols import Model
from pytest_cudagraph.values import Site


@contextmanager
def as_capturing(refusals: Refusals) -> Iterator[None]:
    """Refuse the calls that a capture refuses, and say that a stream is capturing."""
    refusing = ((call.owner, call.name, functools.partial(_refusing, call, refusals)) for call in refused_calls())
    with replaced(refusing), replaced(claims_capture(lambda: refusals.is_active)):
        yield


def _refusing(call: RefusedCall, refusals: Refusals, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if refusals.is_active and (call.name != "to" or moves_to_host(args, kwargs, by_name=True)):
            refusals.refuse(call.text, hazard=call.hazard, operation=call.label)
        return original(*args, **kwargs)

    return refuse


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
