"""Proof that compiled code is what runs, and that nothing is left to compile."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from pytest_cudagraph.errors import CudagraphError
from pytest_cudagraph.inputs import Example, clone
from pytest_cudagraph.protocols import CompiledRegion, Model
from pytest_cudagraph.units import plural

ROUNDS = 4
"""First calls may take another path (caches built, shapes settled); a model that still recompiles then always does."""


def settle(call: Model, regions: Sequence[CompiledRegion], example: Example) -> None:
    """Call until nothing new is compiled and compiled code has been seen to run again.

    Raises :class:`~pytest_cudagraph.errors.CudagraphError` when nothing was compiled, when compiled code does not run,
    or when every call compiles anew.
    """
    for _ in range(ROUNDS):
        regions_before, executions_before = len(regions), _executions(regions)
        _call_both_ways(call, example)
        if not regions:
            raise CudagraphError(f"nothing of the model was compiled: {_why_nothing()}")
        if len(regions) > regions_before:
            continue
        if _executions(regions) == executions_before:
            raise CudagraphError(f"compiled code does not run: {_why_skipped(len(regions))}")
        return
    raise CudagraphError(
        f"each of {ROUNDS} equal calls compiled something new ({plural(len(regions), 'region')} so far): a Python "
        f"value that changes from call to call is compiled in\n  to fix: keep that value in a tensor"
    )


def _call_both_ways(call: Model, example: Example) -> None:
    # Guards tell tensors made in inference mode from others, and later stages bring both.
    inference = clone(example)
    with torch.inference_mode(False):
        ordinary = clone(example)
    for each in (ordinary, inference):
        call(*each.args, **each.kwargs)


def _executions(regions: Sequence[CompiledRegion]) -> int:
    return sum(region.executions for region in regions)


def _why_nothing() -> str:
    for name in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"):
        if os.environ.get(name, "0") not in ("", "0"):
            return f"{name} is set\n  to fix: unset it, or use compile='none'"
    return (
        "TorchDynamo found no graph in it, or skipped it\n"
        "  either it holds nothing that torch.compile compiles (a lone nn.LSTM, torch.compiler.disable)\n"
        "  or its code ran compiled under a TorchDispatchMode (FlopCounterMode is one), which makes TorchDynamo skip "
        "that code for the rest of the process\n"
        "  to fix: compile='none', or call torch._dynamo.reset() after leaving such a mode"
    )


def _why_skipped(regions: int) -> str:
    return (
        f"{plural(regions, 'region')} compiled, none executed by a second call\n"
        "  a call under a TorchDispatchMode (FlopCounterMode is one) makes TorchDynamo skip the code for the rest of "
        "the process\n  to fix: leave such modes, then call torch._dynamo.reset()"
    )
