"""The state of a thread while it captures, on every backend."""

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
    """Mark this thread as capturing, warm-up included. See :func:`is_capturing`."""
    _THREAD.captures += 1
    try:
        yield
    finally:
        _THREAD.captures -= 1


def is_capturing() -> bool:
    """Whether this thread is between the first warm-up and the end of a capture.

    A server of graphs then calls its model instead. CUDA cannot launch a graph inside a capture, and the model's
    kernels belong to the outer graph. Waiting for a thread that waits to capture would be a deadlock.
    """
    return _THREAD.captures > 0


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype to which autocast casts on this type of device, or None where it is off."""
    enabled = torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if enabled else None


@contextmanager
def uncached_autocast() -> Iterator[None]:
    """Turn off autocast's cache of cast weights: a graph that reads such a copy would never see new weights."""
    # Compiled code has a guard on this setting. A needless change would compile it again.
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
