"""Equal random numbers in every test of the check."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_numbers_every_time():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
