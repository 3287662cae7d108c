"""Tests that only a CUDA GPU can answer: collected everywhere, skipped with one reason where there is none."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from tests.gpu.projects import Project, source_first
from tests.gpu.sizes import on_emulated_device

from pytest_cudagraph import pytree
from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.device import EMULATED, why_no_gpu
from pytest_cudagraph.inputs import Example

HERE = Path(__file__).parent


def _cost(item):
    """A GPU may be there for minutes only: first what takes moments, then pytests of their own, last the compilers."""
    return item.get_closest_marker("slow") is not None, "project" in item.fixturenames


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark before ``-m gpu`` is looked at. Asking the machine makes a CUDA context, so only where tests of ours run."""
    ours = [item for item in items if HERE in item.path.parents]
    set_of_ours = set(ours)
    missing = why_no_gpu() if ours else None
    in_order = iter(sorted(ours, key=_cost))
    items[:] = [next(in_order) if item in set_of_ours else item for item in items]
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        # What torch and the compilers deprecate among themselves changes by version, and nothing here is about it.
        item.add_marker(pytest.mark.filterwarnings("default"))
        if missing not in (None, EMULATED):
            item.add_marker(pytest.mark.skip(reason=f"needs a CUDA GPU: {missing.found}"))


@pytest.fixture
def backend():
    return open_backend("cuda")


@pytest.fixture
def pool(backend):
    with backend.pool() as pool:
        yield pool


@pytest.fixture(autouse=True)
def _asynchronous(monkeypatch, known_frozen):
    """On an emulated device too, work waits in its stream's queue. A seed chooses the order among streams."""
    if not on_emulated_device():
        yield
        return
    import cuda_emulator

    monkeypatch.setenv("CUDA_EMULATOR_SEED", "1")  # of the processes that a test starts
    with cuda_emulator.asynchronous(seed=1):
        yield


@pytest.fixture
def orders():
    """What to repeat a test in that needs luck to fail: orders of an emulated device, the one order of a GPU."""
    if not on_emulated_device():
        return [nullcontext()]
    import cuda_emulator

    return [cuda_emulator.asynchronous(seed) for seed in range(6)]


@pytest.fixture(autouse=True)
def _same_numbers_every_time():
    torch.manual_seed(0)


@pytest.fixture
def capture(pool):
    """Capture one graph of a model, of plain positional inputs."""

    def capture(model, *args, batch_size=None):
        return pool.capture(model, args, {}, batch_size=batch_size or len(args[0]))

    return capture


@pytest.fixture
def examples(backend):
    """Random rows for every batch size asked for."""

    def make(*sizes, features=64):
        rows = {size: torch.randn(size, features, device=backend.device) for size in sizes}
        return {size: Example(args=(row,), kwargs={}) for size, row in rows.items()}

    return make


@pytest.fixture
def reserved(backend):
    """Bytes the allocator holds once it has given back what nobody uses."""

    def read():
        backend.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    return read


@pytest.fixture
def copied():
    """A copy of what a replay returned, which the next replay overwrites."""
    return lambda output: pytree.map_tensors(torch.clone, output)


@pytest.fixture
def answering():
    """``cuda_emulator.nvml.answering``: what the driver of the emulated device answers."""
    if why_no_gpu() != EMULATED:
        pytest.skip("the driver of a GPU answers by itself")
    from cuda_emulator.nvml import answering

    return answering


@pytest.fixture
def project(pytester, request, monkeypatch):
    """A user's project on this GPU."""
    monkeypatch.setenv("PYTHONPATH", source_first())
    return Project(pytester, is_installed=request.config.pluginmanager.hasplugin("cudagraph"))
