"""What holds for a thread while it captures, on every backend."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Thread(threading.local):
    captures = 0


_THREAD = _Thread()


@contextmanager
def capturing() -> Iterator[None]:
    """Mark a capture of this thread, its warm-up included."""
    _THREAD.captures += 1
    try:
        yield
    finally:
        _THREAD.captures -= 1


def is_capturing() -> bool:
    """Whether this thread is between the first warm-up and the end of a capture.

    What serves calls from graphs then calls its model instead: CUDA launches no graph inside of a capture, the model's
    own kernels belong to the outer graph, and waiting for a thread that waits to capture would never end.
    """
    return _THREAD.captures > 0


@contextmanager
def uncached_autocast() -> Iterator[None]:
    """Autocast without its cache of cast weights: a graph that reads such a copy would never see new weights."""
    # Compiled code is guarded by this setting: touched for nothing, it would be compiled again.
    if not torch._C._is_any_autocast_enabled():
        yield
        return
    was_enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)
