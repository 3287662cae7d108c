"""The examples run from a plain checkout and from an installed package alike."""

import sys
from pathlib import Path

import pytest
import torch

# Some examples import the decoder of this folder, also where pytest's import mode leaves the folder out.
sys.path.insert(0, str(Path(__file__).parent))

# On a CPU, one thread: for operations this small, waking the others costs more than it gains, and varies.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _the_same_weights_every_time():
    """Random weights decide nothing here, but the same ones make two runs comparable."""
    torch.manual_seed(0)
