"""What the versions of torch leave behind after a refused capture, and what replays may not lose: by the fake."""

import threading

import pytest
import torch
from tests.fake_cuda import FakeCuda, FakeStream, adds_one, capture, reads_a_scalar

from pytest_cudagraph.backends.cuda import CudaBackend, gpu
from pytest_cudagraph.errors import CaptureRefusal

pytestmark = pytest.mark.usefixtures("no_collections")

VERSIONS = [(2, 6), (2, 10), (2, 13), (2, 14)]


@pytest.mark.parametrize("version", VERSIONS)
def test_after_a_refusal_the_same_pool_captures_again_and_no_share_is_left(version):
    cuda = FakeCuda(version=version)
    with CudaBackend(cuda=cuda, device="cpu").pool() as pool:
        for _ in range(2):
            with pytest.raises(CaptureRefusal, match="operation not permitted"):
                capture(pool, reads_a_scalar)
        assert capture(pool, adds_one).replay().tolist() == [2.0, 2.0]
        assert cuda.underway == []
    assert set(cuda.shares.values()) == {0}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_refusal_beside_an_open_graph_leaves_no_share_and_releases_none_twice(version):
    cuda = FakeCuda(version=version)
    with CudaBackend(cuda=cuda, device="cpu").pool() as pool:
        for _ in range(2):
            capture(pool, adds_one)
            for _ in range(2):  # the second has a pool of its own
                with pytest.raises(CaptureRefusal):
                    capture(pool, reads_a_scalar)
    assert set(cuda.shares.values()) == {0}
    assert not cuda.is_pool_broken


@pytest.mark.parametrize("version", VERSIONS)
def test_a_refusal_never_takes_the_share_of_a_graph_that_is_open(version):
    cuda = FakeCuda(version=version)
    with CudaBackend(cuda=cuda, device="cpu").pool() as pool:
        graph = capture(pool, adds_one)
        handle = cuda.graphs[0].handle
        with pytest.raises(CaptureRefusal):
            capture(pool, reads_a_scalar)
        assert cuda.shares[handle] >= 1
        assert capture(pool, adds_one).replay().tolist() == graph.replay().tolist()


def test_the_handle_of_a_refused_capture_would_be_refused():
    # Shows that the fake breaks as torch 2.10 to 2.12 do, and hence that the tests above prove something.
    cuda = FakeCuda(version=(2, 11))
    pool = CudaBackend(cuda=cuda, device="cpu").pool()
    capture(pool, adds_one)
    with pytest.raises(CaptureRefusal):
        capture(pool, reads_a_scalar)
    with pytest.raises(RuntimeError, match="already recording to mempool_id"):
        cuda.CUDAGraph().capture_begin(cuda.graphs[0].handle, "global")


# Workspaces of cuBLAS


@pytest.fixture
def workspaces(cuda, monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: cuda.note("clear_workspaces"), raising=False)


def test_workspaces_are_taken_from_the_graphs_pool_and_forgotten_after_the_capture(cuda, pool, workspaces):
    capture(pool, adds_one)
    kept = ("synchronize", "clear_workspaces", "capture_begin", "capture_end")
    names = [name for name in cuda.names() if name in kept]
    # the wait after the warm-up, the one of torch.cuda.graph, the one that shows errors of the capture
    assert names == [
        *("synchronize", "clear_workspaces", "synchronize", "capture_begin"),
        *("capture_end", "clear_workspaces", "synchronize"),
    ]


def test_workspaces_are_forgotten_after_a_refused_capture_too(cuda, pool, workspaces):
    with pytest.raises(CaptureRefusal):
        capture(pool, reads_a_scalar)
    # around the refused capture, and around the test capture of the recovery
    assert cuda.names().count("clear_workspaces") == 4


# Other threads


def test_without_other_threads_the_strictest_mode_is_used(one_thread):
    assert gpu.capture_error_mode() == "global"


def test_threads_of_python_count(one_thread, monkeypatch):
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    assert gpu.capture_error_mode() == "thread_local"


def test_threads_that_threading_did_not_start_count_too(one_thread, monkeypatch):
    monkeypatch.setattr(gpu.sys, "_current_frames", lambda: {1: None, 2: None})
    assert gpu.capture_error_mode() == "thread_local"


def test_the_watchdogs_of_distributed_count_as_threads(one_thread, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True, raising=False)
    assert gpu.capture_error_mode() == "thread_local"


# Other streams


@pytest.mark.parametrize(
    "said",
    [
        "capturing stream has unjoined work",
        "dependency created on uncaptured work in another stream",
        "operation would make the legacy stream depend on a capturing blocking stream",
        "operation failed due to a previous error during capture",
    ],
)
def test_work_on_another_stream_is_named_by_its_operation_and_line(cuda, refused_at_the_end, said):
    side = FakeStream(cuda, "other")

    def model(x):
        y = x + 1
        with cuda.stream(side):
            z = y.mul(2)
        return y + z

    refusal = refused_at_the_end(said, model)
    assert refusal.text == said
    assert (refusal.hazard, refusal.operation) == ("unknown-op", "aten.mul")
    assert refusal.site.line == model.__code__.co_firstlineno + 3
    assert "wait_stream both ways" in refusal.fix


def test_an_echo_without_a_known_cause_still_says_what_to_do(cuda, refused_at_the_end):
    refusal = refused_at_the_end("capturing stream has unjoined work", adds_one)
    assert (refusal.operation, refusal.site) == ("", None)
    assert "wait_stream both ways" in refusal.fix


def test_a_refused_operation_comes_before_one_on_another_stream(cuda, refused_at_the_end):
    side = FakeStream(cuda, "other")

    def model(x):
        try:
            x.sum().item()
        except RuntimeError:
            pass
        with cuda.stream(side):
            return x + 1

    refusal = refused_at_the_end("operation failed due to a previous error during capture", model)
    assert refusal.hazard == "host-sync"
    assert refusal.fix == ""
    assert refusal.site.line == model.__code__.co_firstlineno + 2


@pytest.fixture
def refused_at_the_end(cuda, pool):
    def refused(said, model):
        cuda.failures["capture_end"] = [RuntimeError(f"CUDA error: {said}\nCompile with TORCH_USE_CUDA_DSA.")]
        with pytest.raises(CaptureRefusal) as raised:
            capture(pool, model)
        assert capture(pool, adds_one).replay().tolist() == [2.0, 2.0]
        return raised.value

    return refused
