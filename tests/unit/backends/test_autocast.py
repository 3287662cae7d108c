"""The autocast cache is off around a capture under autocast, and left alone otherwise."""

from __future__ import annotations

import torch

from pytest_cudagraph.backends.capture_mode import uncached_autocast


def test_without_autocast_the_setting_that_guards_compiled_code_is_not_touched():
    with uncached_autocast():
        assert torch.is_autocast_cache_enabled()


def test_under_autocast_the_cache_is_off_and_afterwards_as_it_was():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with uncached_autocast():
            assert not torch.is_autocast_cache_enabled()
        assert torch.is_autocast_cache_enabled()
