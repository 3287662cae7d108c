"""Whether this thread is in the middle of a capture."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


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
