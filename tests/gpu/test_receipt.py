"""The receipt's kernels are those the profiler sees a replay run."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from tests.gpu.profiled import device_work, wake_profiler
from tests.gpu.small_models import Mlp

from pytest_cudagraph.backends.cuda import CudaBackend
from pytest_cudagraph.backends.cuda.nodes import NOT_KEPT


@pytest.fixture
def counted():
    """Skips where nothing can look into a graph."""
    if not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph"):
        pytest.skip("nothing counts the nodes of a graph here: needs torch 2.8 or newer")


def test_the_driver_counts_what_the_profiler_sees(counted, tmp_path):
    wake_profiler(tmp_path)
    model, x = Mlp().cuda().eval(), torch.randn(8, 64, device="cuda")
    with CudaBackend().pool() as pool:
        graph = pool.capture(model, (x,), {}, batch_size=8)
        graph.replay()
        seen = device_work(graph.replay, tmp_path)
    assert graph.receipt.kernels == len(seen), (Counter(seen), graph.receipt.kernel_names)
    assert "kernel" not in graph.receipt.kernel_names, "the driver told no names"


def test_where_there_is_no_count_the_receipt_says_why_and_only_there(capture):
    receipt = capture(lambda x: x + 1, torch.ones(4, device="cuda")).receipt
    assert (receipt.kernels is None) == bool(receipt.not_counted), receipt
    if not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph"):
        assert receipt.not_counted == NOT_KEPT


def test_the_memory_of_a_graph_is_what_its_pool_grew_by(backend):
    x = torch.ones(1 << 20, device="cuda")
    with backend.pool() as pool:
        first = pool.capture(lambda x: x + 1, (x,), {}, batch_size=1).receipt.memory_bytes
        second = pool.capture(lambda x: x + 1, (x,), {}, batch_size=1).receipt.memory_bytes
        held = [
            segment["total_size"]
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) == tuple(pool._handle)
        ]
    assert first >= 4 << 20, "an output of 4 MiB lies in the pool"
    assert first + second == sum(held)


def test_kernels_of_the_receipt_are_what_a_replay_runs(counted, capture, tmp_path):
    wake_profiler(tmp_path)
    graph = capture(Mlp().cuda().eval(), torch.randn(8, 64, device="cuda"))
    graph.replay()
    seen = device_work(graph.replay, tmp_path)
    assert graph.receipt.kernels == len(seen), Counter(seen)


def test_copies_and_fills_are_counted_like_kernels(counted, capture, tmp_path):
    wake_profiler(tmp_path)
    held = torch.zeros(1 << 16, device="cuda")

    def model(x):
        held.copy_(x)  # a device-to-device copy node, or a kernel: CUDA's choice, and the profiler's word
        return torch.zeros_like(x) + held

    graph = capture(model, torch.randn(1 << 16, device="cuda"))
    graph.replay()
    seen = device_work(graph.replay, tmp_path)
    assert graph.receipt.kernels == len(seen), (Counter(seen), graph.receipt.kernel_names)


def test_kernel_names_are_short_and_tell_the_operations_apart(counted, capture):
    graph = capture(lambda x: (x + 1) * x, torch.randn(64, device="cuda"))
    assert graph.receipt.kernels == 2
    assert len(graph.receipt.kernel_names) == 2, graph.receipt.kernel_names
    assert all(len(name) < 120 for name in graph.receipt.kernel_names)


def test_one_more_operation_is_one_more_kernel(counted, capture):
    x = torch.randn(64, device="cuda")
    short, longer = capture(lambda x: x + 1, x), capture(lambda x: (x + 1).relu(), x)
    assert longer.receipt.kernels == short.receipt.kernels + 1


def test_a_replay_runs_one_launch_and_not_the_kernels_one_by_one(capture, tmp_path):
    wake_profiler(tmp_path)
    model, x = Mlp().cuda().eval(), torch.randn(8, 64, device="cuda")
    graph = capture(model, x)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as seen:
        graph.replay()
        torch.cuda.synchronize()
    launches = [event.name for event in seen.events() if "Launch" in event.name]
    assert len(launches) == 1, launches
    assert launches[0].startswith("cudaGraphLaunch")


def test_the_time_to_capture_is_told(capture):
    assert 0 < capture(lambda x: x + 1, torch.ones(4, device="cuda")).receipt.capture_ns < 60e9
