"""The runner on the CUDA backend, driven by a fake of torch.cuda: order of streams, waits, memory, refusals."""

from __future__ import annotations

import gc

import pytest
import torch
from tests.fake_cuda import FakeCuda, FakeStream
from torch import nn

from pytest_cudagraph import GraphRunner
from pytest_cudagraph.backends.cuda import CudaBackend


@pytest.fixture(autouse=True)
def no_collections(monkeypatch):
    """A collection of everything torch holds takes a fifth of a second."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


@pytest.fixture
def cuda():
    return FakeCuda()


@pytest.fixture
def model():
    return nn.Linear(3, 2).eval()


def runner(model, cuda, **options):
    options.setdefault("batch_sizes", (2, 4))
    return GraphRunner(model, torch.randn(2, 3), backend=CudaBackend(cuda=cuda, device="cpu"), **options)


def eager(model, x):
    with torch.inference_mode():
        return model(x)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_answers_are_those_of_eager(model, cuda, rows):
    x = torch.randn(rows, 3)
    torch.testing.assert_close(runner(model, cuda)(x), eager(model, x))


def test_a_call_launches_once_and_neither_waits_nor_captures(model, cuda):
    run = runner(model, cuda)
    cuda.calls.clear()
    run(torch.randn(2, 3))
    run(torch.randn(3, 3))
    assert cuda.calls == ["replay", "replay"]


def test_a_caller_on_another_stream_waits_for_the_one_before(model, cuda):
    run = runner(model, cuda)
    run(torch.randn(2, 3))
    cuda.calls.clear()
    with cuda.stream(FakeStream(cuda, "other")):
        run(torch.randn(2, 3))
        run(torch.randn(2, 3))
    run(torch.randn(5, 3))  # eager, too: it reads and writes the same state
    assert cuda.calls == ["wait_stream other after caller", "replay", "replay", "wait_stream caller after other"]


def test_memory_is_told_for_each_graph_and_released_at_the_end(model, cuda):
    with runner(model, cuda) as run:
        held = run.statistics.memory_bytes
        assert sorted(held) == [2, 4]
        assert all(size > 0 for size in held.values())
    assert cuda.graphs == []
    assert cuda.underway == []


def test_a_bounded_runner_waits_and_resets_before_it_captures_again(model, cuda):
    run = runner(model, cuda, max_graphs=1)
    cuda.calls.clear()
    run(torch.randn(2, 3))
    names = cuda.names()
    assert names.index("reset") < names.index("capture_begin")
    assert names[names.index("reset") - 1] == "synchronize"
    assert len(cuda.graphs) == 1
    assert (run.statistics.evictions, run.statistics.captures) == (1, 2)


def test_a_model_that_reads_on_the_host_runs_eager(cuda):
    run = runner(lambda x: x * x.sum().item(), cuda)
    x = torch.randn(2, 3)
    assert torch.equal(run(x), x * x.sum().item())
    found = run.statistics
    assert dict(found.eager) == {"capture refused": 1}
    assert sorted(found.refused) == [2, 4]
    assert found.refused[4].startswith("operation not permitted when stream is capturing")


def test_new_weights_close_the_old_graphs(model, cuda):
    run = runner(model, cuda)
    model.weight.data = model.weight.data * 2
    x = torch.randn(2, 3)
    torch.testing.assert_close(run(x), eager(model, x))
    assert (run.statistics.state_changes, len(cuda.graphs)) == (1, 1)
