"""A graph computes as before whatever becomes of the graphs beside it; see the script for what is tried."""

from __future__ import annotations

import pytest
import torch
from tests.gpu.neighbours import KINDS
from tests.gpu.processes import last_line_of
from tests.gpu.sizes import large


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_that_stays_computes_as_before_and_writes_to_its_own_memory_only(kind):
    assert last_line_of("neighbours.py", kind) == f"fine with: {kind}"


def test_a_workspace_of_cublas_lies_in_the_graphs_own_pool_and_goes_with_it(backend, reserved):
    width = large(4096)
    layer = torch.nn.Linear(width, width, device=backend.device)
    x = torch.randn(8, width, device=backend.device)
    with torch.inference_mode():
        layer(x)  # whatever the library keeps for the caller's stream is there from now on
    with backend.pool() as warm:
        warm.capture(layer, (x,), {}, batch_size=8)
    before = reserved()
    with backend.pool() as pool:
        pool.capture(layer, (x,), {}, batch_size=8)
    assert reserved() <= before
