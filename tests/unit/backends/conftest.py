"""The CUDA backend driven by a fake of ``torch.cuda``; see ``tests/fake_cuda.py`` for what it imitates."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace

import pytest
import torch
from tests.fake_cuda import FakeCuda

from pytest_cudagraph.backends.cuda import CudaBackend, gpu
from pytest_cudagraph.sources import user_lines


@pytest.fixture
def no_collections(monkeypatch):
    """A collection of everything torch holds takes a fifth of a second."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


@pytest.fixture
def fake_is_no_users_code(monkeypatch):
    """What refuses on a GPU is C++ without a frame; the frames of the fake must not count as a user's."""
    is_user_file = user_lines._is_user_file
    monkeypatch.setattr(user_lines, "_is_user_file", lambda name: "fake_cuda" not in name and is_user_file(name))


@pytest.fixture
def one_thread(monkeypatch):
    """Compilers that other tests used may have left threads behind."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(gpu, "sys", SimpleNamespace(_current_frames=lambda: {1: None}))


@pytest.fixture
def cuda():
    return FakeCuda()


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
