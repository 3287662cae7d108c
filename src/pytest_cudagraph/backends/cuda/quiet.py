"""What must hold still around a capture: the garbage collector, other threads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Collect now, then keep everything alive out of reach of the collector until the block ends.

    A collection in the middle of a capture may destroy another graph or an event, which CUDA refuses while capturing.
    """
    gc.collect()
    if gc.get_freeze_count():
        # Someone else has frozen the heap (a server before it forks); unfreezing would undo that too.
        with _disabled_collector():
            yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _disabled_collector() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def capture_error_mode() -> str:
    """``thread_local`` while other Python threads live, else ``global``, CUDA's strictest.

    In the global mode a harmless call of another thread (a logger, a data loader) invalidates the capture.
    """
    return "thread_local" if threading.active_count() > 1 else "global"
