"""The CPU twin, and the CUDA backend on a fake of ``torch.cuda`` (``tests/fake_cuda.py``)."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace

import pytest
import torch
from tests.fake_cuda import FakeCuda

from pytest_cudagraph.backends.cpu import CpuBackend
from pytest_cudagraph.backends.cuda import CudaBackend, gpu


@pytest.fixture
def twin():
    """A pool of the CPU twin."""
    with CpuBackend().pool() as pool:
        yield pool


@pytest.fixture
def one_thread(monkeypatch):
    """Compilers that other tests used may have left threads behind."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(gpu, "sys", SimpleNamespace(_current_frames=lambda: {1: None}))


@pytest.fixture
def cuda():
    gc.unfreeze()  # A capture freezes the heap only if it is not frozen yet, and most tests run with a frozen heap.
    yield FakeCuda()
    gc.freeze()


@pytest.fixture
def backend(cuda):
    return CudaBackend(cuda=cuda, device="cpu")


@pytest.fixture
def pool(backend):
    with backend.pool() as pool:
        yield pool


@pytest.fixture
def capture(pool):
    """Capture one call of a model, of plain positional inputs: two ones unless others are given."""

    def capture(model, *args):
        return pool.capture(model, args or (torch.ones(2),), {}, batch_size=2)

    return capture
