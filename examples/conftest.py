"""The examples run from a plain checkout and from an installed package alike."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _the_same_weights_every_time():
    """Random weights decide nothing here, but the same ones make two runs comparable."""
    torch.manual_seed(0)
