"""A replay runs no Python of the model: watched where it is proved, and not where it is timed.

A capture on a GPU has left all Python behind. Here a step is a call, and could come back to it: through an operator of
PyTorch that was given a kernel in Python. Compiled code and custom operators are steps whose inside is their own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType

from torch import nn

from pytest_cudagraph import sources
from pytest_cudagraph.backends.cpu.lowering import Step
from pytest_cudagraph.collector import without_collections
from pytest_cudagraph.errors import CudagraphError
from pytest_cudagraph.values import Site

_MODULE_CALLS = frozenset({nn.Module._wrapped_call_impl.__code__, nn.Module._call_impl.__code__})


def run_watched(steps: Iterable[Step], opaque: frozenset[Step]) -> None:
    """Run the steps in order; :class:`~pytest_cudagraph.errors.CudagraphError` before a function of the model runs.

    Where a profiler holds the only hook that Python has for this, nothing is watched.
    """
    is_free = sys.getprofile() is None
    # What a collection calls, such as __del__, would seem to be called by the step it happens in.
    with without_collections():
        for step in steps:
            if is_free and step not in opaque:
                _run_watched(step)
            else:
                step()


def _run_watched(step: Step) -> None:
    sys.setprofile(_spring)
    try:
        step()
    finally:
        sys.setprofile(None)


def _spring(frame: FrameType, event: str, arg: object) -> None:
    if event != "call":
        return
    code = frame.f_code
    if code in _MODULE_CALLS or sources.origin_of(code.co_filename) != "machinery":
        sys.setprofile(None)
        site = Site(file=code.co_filename, line=code.co_firstlineno, function=code.co_name)
        raise CudagraphError(
            f"a replay runs no Python of the model, and came to {site} in {code.co_name}: "
            "an operator of PyTorch was given a kernel in Python\n"
            "register the function as a custom operator (torch.library.custom_op), which is one step of the graph"
        )
