"""What must hold still around a capture: the garbage collector, other threads."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pytest_cudagraph.collector import without_collections


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Collect now, then keep everything alive out of reach of the collector until the block ends.

    A collection in the middle of a capture may destroy another graph or an event, which CUDA refuses while capturing.
    """
    gc.collect()
    if gc.get_freeze_count():
        # Someone else has frozen the heap (a server before it forks); unfreezing would undo that too.
        with without_collections():
            yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def capture_error_mode() -> str:
    """``thread_local`` while other threads live that may use CUDA, else ``global``, CUDA's strictest.

    In the global mode a harmless call of another thread (a logger, a data loader) invalidates the capture. Threads
    that Python's ``threading`` did not start are counted too, and the watchdogs of ``torch.distributed``, in C++.
    """
    others = threading.active_count() > 1 or len(sys._current_frames()) > 1
    return "thread_local" if others or _is_distributed() else "global"


def _is_distributed() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()
