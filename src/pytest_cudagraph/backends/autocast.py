"""Autocast around a capture, on every backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
