"""A process of its own: graphs come and go beside one that stays, and the one that stays must compute as before.

``python neighbours.py KIND``. Where this fails, a kernel writes to memory that is not its own any more, which ends
all work of a process on the GPU; hence a process for each kind.
"""

from __future__ import annotations

import sys

import pytest
import torch
from tests.gpu.sizes import large
from torch import nn

from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.errors import CaptureRefusal


def square_layer(x: torch.Tensor) -> nn.Linear:
    return nn.Linear(x.shape[-1], x.shape[-1], device=x.device)


def reads_a_scalar(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def close_a_neighbour(backend, pool, neighbour, x):
    neighbour.close()


def close_another_pool(backend, pool, neighbour, x):
    with backend.pool() as other:
        other.capture(square_layer(x), (x,), {}, batch_size=len(x)).replay()


def refuse_a_capture(backend, pool, neighbour, x):
    with pytest.raises(CaptureRefusal):
        pool.capture(reads_a_scalar, (x,), {}, batch_size=len(x))


def clear_all_workspaces(backend, pool, neighbour, x):
    torch._C._cuda_clearCublasWorkspaces()  # as graph trees do with every recording


def capture_a_later_one(backend, pool, neighbour, x):
    pool.capture(square_layer(x), (x[:1],), {}, batch_size=1).replay()


KINDS = {
    each.__name__.replace("_", "-"): each
    for each in (
        close_a_neighbour,
        close_another_pool,
        refuse_a_capture,
        clear_all_workspaces,
        capture_a_later_one,
    )
}


def main(kind: str) -> None:
    backend = open_backend("cuda")
    torch.manual_seed(0)
    # Few rows and a long sum: cuBLAS splits it and adds the parts in a workspace.
    x = torch.randn(8, large(4096), device=backend.device)
    layer = square_layer(x).requires_grad_(False)
    with backend.pool() as pool:
        neighbour = pool.capture(layer, (x,), {}, batch_size=8)
        stays = pool.capture(layer, (x[:4],), {}, batch_size=4)
        expected = stays(x[:4]).clone()
        torch.testing.assert_close(expected, layer(x[:4]))
        KINDS[kind](backend, pool, neighbour, x)
        backend.synchronize()
        torch.cuda.empty_cache()
        # Takes the memory that has become free, on the streams it may have come from.
        filled = [torch.full((large(4 << 20),), 7.0, device=backend.device) for _ in range(64)]
        for _ in range(20):
            seen = stays(x[:4])
        backend.synchronize()
        torch.testing.assert_close(seen, expected, msg=lambda text: f"{kind}: the graph that stays is wrong\n{text}")
        assert all(each.eq(7).all() for each in filled), f"{kind}: the graph that stays has written to other memory"
    print("fine with:", kind)


if __name__ == "__main__":
    main(sys.argv[1])
