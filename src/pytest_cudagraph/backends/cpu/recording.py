"""One recorded call, after which everything is as before: state, random numbers, torch itself."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from pytest_cudagraph import hazards, leaves
from pytest_cudagraph.backends.cpu.guards import capturing
from pytest_cudagraph.backends.cpu.outside import Outside, names_of
from pytest_cudagraph.backends.cpu.recorder import open_recorder
from pytest_cudagraph.backends.cpu.refusals import Refusals
from pytest_cudagraph.backends.cpu.tape import Tape
from pytest_cudagraph.backends.cpu.witness import Witness
from pytest_cudagraph.errors import CaptureRefusal
from pytest_cudagraph.protocols import Model
from pytest_cudagraph.values import Site


def record(
    model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any], witness: Witness | None = None
) -> tuple[Tape, Any]:
    """The tape of one call and its output, poisoned: as with CUDA, a capture computes nothing.

    ``witness`` has seen the call before: memory that is new to it was made where the recording is blind.
    Raises :class:`~pytest_cudagraph.errors.CaptureRefusal` for the first thing a capture refuses, also where the
    model caught it.
    """
    refusals = Refusals()
    names = names_of(model)
    known = None if witness is None else lambda key: key in names or witness.has_seen(key)
    tape = Tape(refusals, inputs=leaves.tensors_in((args, kwargs)), outside=Outside(names), known=known)
    random = torch.get_rng_state()
    compiled = _compiled_frames()
    try:
        output = _call(model, args, kwargs, tape, refusals)
    except CaptureRefusal as refused:
        if _compiled_frames() != compiled:
            # What a compile did first (it saves the random state) would point away from the cause.
            raise _compile_refusal(refused.site) from refused
        raise
    finally:
        tape.ledger.undo()
        torch.set_rng_state(random)
    if _compiled_frames() != compiled:
        raise _compile_refusal(None)
    tape.ledger.poison()
    return tape, output


def _call(model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any], tape: Tape, refusals: Refusals) -> Any:
    try:
        with capturing(refusals), open_recorder(tape, refusals):
            output = model(*args, **kwargs)
    except Exception as exc:
        # Whatever the model made of a refusal (its own error, CUDA's echo), the reason is the first one.
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
