"""Pause Python's garbage collector, or hide living objects from it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable automatic collection inside the block, and restore the collector afterwards."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def heap_frozen() -> Iterator[None]:
    """Collect garbage, then hide all living objects from the collector until the block ends.

    A collection during a capture may destroy a graph or an event, which CUDA refuses while capturing.
    """
    gc.collect()
    if gc.get_freeze_count():
        # A server may have frozen its heap before a fork. Unfreezing here would undo that.
        with gc_paused():
            yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
