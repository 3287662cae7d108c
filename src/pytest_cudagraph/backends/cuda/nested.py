"""Compiled code that records and launches CUDA graphs of its own, which none can be captured around."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pytest_cudagraph.errors import CaptureRefusal
from pytest_cudagraph.sources import user_site

_TREES = "torch._inductor.cudagraph_trees"


@contextmanager
def no_graphs_inside() -> Iterator[None]:
    """Refuse a call of code that ``torch.compile`` has given graphs of its own, as ``mode="reduce-overhead"`` does.

    It is the call that is refused, whatever turned its graphs on: a mode, an option, a setting. The very first call
    of such code loads what is watched here; its second call is refused. Raises
    :class:`~pytest_cudagraph.errors.CaptureRefusal` from within, at the user's line. Other threads are let through.
    """
    manager = getattr(sys.modules.get(_TREES), "CUDAGraphTreeManager", None)
    if manager is None:
        yield
        return
    run = manager._run  # compiled code has bound run itself, which looks this one up at every call
    manager._run = _refusing(run, threading.get_ident())
    try:
        yield
    finally:
        manager._run = run


def _refusing(run: Callable[..., Any], here: int) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != here:
            return run(self, *args, **kwargs)
        raise CaptureRefusal(
            "compiled code inside the call runs CUDA graphs of its own",
            site=user_site(),
            fix='compile without them: the default mode, or mode="max-autotune-no-cudagraphs"; '
            "and leave torch._inductor.config.triton.cudagraphs off",
        )

    return refuse
