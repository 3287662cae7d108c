"""The runner on the CUDA backend, driven by a fake of torch.cuda: order of streams, waits, memory, refusals."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from tests.fake_cuda import FakeCuda, FakeStream
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pytest_cudagraph import GraphRunner
from pytest_cudagraph.backends.cpu import CpuBackend
from pytest_cudagraph.backends.cuda import CudaBackend
from pytest_cudagraph.backends.device_asserts import TrapGuard
from pytest_cudagraph.errors import InputError
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.serving import graph_runner, row_analysis
from pytest_cudagraph.serving.request import CompilerOptions

pytestmark = pytest.mark.usefixtures("no_collections", "known_frozen")


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


@pytest.mark.parametrize(("is_gpu", "guards"), [(True, 2), (False, 0)])
def test_rows_that_were_made_up_are_tried_behind_a_guard_on_a_gpu_alone(model, cuda, monkeypatch, is_gpu, guards):
    made = []
    monkeypatch.setattr(row_analysis, "TrapGuard", lambda: made.append(TrapGuard()) or made[-1])
    backend = CudaBackend(cuda=cuda, device="cpu") if is_gpu else CpuBackend()
    GraphRunner(model, torch.randn(2, 3), batch_sizes=(4,), backend=backend)
    assert len(made) == guards


def test_an_operator_that_nobody_can_look_into_is_given_no_made_up_rows_on_a_gpu(cuda):
    called = []

    @torch.library.custom_op("runner_on_fake_cuda::noted", mutates_args=())
    def noted(x: torch.Tensor) -> torch.Tensor:
        called.append(x.clone())
        return x * 2

    x = torch.arange(6.0).reshape(2, 3)
    run = GraphRunner(noted, x, batch_sizes=(4,), backend=CudaBackend(cuda=cuda, device="cpu"))
    assert all(bool(torch.isin(given, x).all()) for given in called if given.numel())
    assert torch.equal(run(x), x * 2)


@pytest.fixture
def gpus(monkeypatch):
    """A machine of several GPUs; what was opened, and on which GPU."""
    opened, current = [], [0]

    @contextmanager
    def device(given):
        if given.type != "cuda":
            raise ValueError(f"Expected a cuda device, but got: {given}")
        before, current[0] = current[0], given.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", device)

    def open_backend(kind):
        opened.append((kind, current[0]))
        return SimpleNamespace(kind=kind, device="cpu" if kind == "cpu" else f"cuda:{current[0]}")

    kind_of = {"cpu": "cpu", "cuda": "cuda", "auto": "cuda"}
    monkeypatch.setattr(graph_runner, "choose", lambda option: SimpleNamespace(kind=kind_of[option]))
    monkeypatch.setattr(graph_runner, "open_backend", open_backend)
    return opened


def inputs_on(device):
    with FakeTensorMode():
        return Example(args=(torch.empty(2, 3, device=device),), kwargs={})


@pytest.mark.parametrize(
    ("option", "device", "opened"),
    [
        ("auto", "cuda:1", ("cuda", 1)),
        ("cuda", "cuda:0", ("cuda", 0)),
        ("cpu", "cpu", ("cpu", 0)),
    ],
)
def test_graphs_live_on_the_gpu_of_the_inputs_whichever_is_current(gpus, option, device, opened):
    graph_runner.open_backend_for(option, inputs_on(device))
    assert gpus == [opened]


def test_inputs_on_the_host_are_refused_by_a_gpu_with_the_remedy(gpus):
    with pytest.raises(InputError, match=r"args\[0\] is on cpu, but this run uses cuda:0: pass it as .to\('cuda:0'\)"):
        graph_runner.open_backend_for("cuda", inputs_on("cpu"))
    assert gpus == [("cuda", 0)]


def test_a_compiler_on_auto_follows_inputs_that_lie_on_the_host():
    options = CompilerOptions(graphs=True, batch_sizes=(1,), device="auto", max_graphs=None, compile_timeout_s=1)
    assert options.device_for(inputs_on("cpu")) == options.device_for(Example(args=(), kwargs={})) == "cpu"
    assert options.device_for(inputs_on("cuda:1")) == "cuda"
