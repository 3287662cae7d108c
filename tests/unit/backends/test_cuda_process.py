"""What else lives in a process that captures on a GPU: other allocators, other threads, streams that a model leaves."""

import threading

import pytest
import torch
from tests.fake_cuda import REFUSED, FakeCuda, FakeStream, adds_one, reads_a_scalar
from tests.fake_cuda import capture as capture_in

from pytest_cudagraph.backends.cuda import CudaBackend
from pytest_cudagraph.backends.cuda.gpu import Gpu
from pytest_cudagraph.backends.cuda.refusals import refusal_of
from pytest_cudagraph.errors import CaptureRefusal

pytestmark = pytest.mark.usefixtures("no_collections")

NO_STATISTICS = "CUDAPluggableAllocator does not yet support getDeviceStats."


def capture_with(cuda):
    return capture_in(CudaBackend(cuda=cuda, device="cpu").pool(), adds_one)


# Other allocators, which raise where torch's own has an answer


@pytest.mark.parametrize("allocator", ["cudaMallocAsync", "pluggable"])
def test_with_an_allocator_that_lists_no_memory_graphs_are_captured_and_never_filled(allocator):
    graph = capture_with(FakeCuda(allocator=allocator))
    output = graph.replay()
    graph.poison()  # the backend does not know which memory is the graph's own
    assert not output.isnan().any()
    assert graph(torch.zeros(2)).tolist() == [1.0, 1.0]


def test_without_pools_the_memory_of_a_graph_is_what_the_allocator_has_grown_by():
    assert capture_with(FakeCuda(allocator="cudaMallocAsync")).receipt.memory_bytes == 8


@pytest.mark.parametrize("readings", [[RuntimeError(NO_STATISTICS)] * 2, [None, RuntimeError(NO_STATISTICS)]])
def test_an_allocator_that_keeps_no_statistics_leaves_the_memory_of_a_graph_open(readings):
    cuda = FakeCuda(allocator="pluggable", failures={"memory_reserved": readings})
    assert capture_with(cuda).receipt.memory_bytes is None


def test_memory_that_the_allocator_gives_back_meanwhile_is_no_growth_below_nothing(monkeypatch):
    cuda, held_bytes = FakeCuda(allocator="cudaMallocAsync"), [2_000, 1_500]
    monkeypatch.setattr(cuda, "memory_reserved", lambda device=None: held_bytes.pop(0))
    assert capture_with(cuda).receipt.memory_bytes == 0


# Streams that a model leaves behind


@pytest.fixture
def other(cuda):
    return FakeStream(cuda, "other")


def assert_fit(cuda, capture):
    assert (cuda.capturing, cuda.underway, cuda.stream_now.name) == (None, [], "caller")
    assert capture(adds_one)(torch.zeros(2)).tolist() == [1.0, 1.0]


def test_a_call_that_ends_on_another_stream_is_refused_at_the_operation_that_no_graph_holds(cuda, capture, other):
    def model(x):
        y = x + 1
        cuda.set_stream(other)
        return y.mul(2)

    with pytest.raises(CaptureRefusal) as raised:
        capture(model)
    refusal = raised.value
    assert refusal.text == "Capture must end on the same stream it began on."
    assert (refusal.hazard, refusal.operation) == ("unknown-op", "aten.mul")
    assert refusal.site.line == model.__code__.co_firstlineno + 3
    assert "wait_stream both ways" in refusal.fix
    assert_fit(cuda, capture)


def test_a_call_that_ends_elsewhere_only_while_it_is_captured_still_gets_the_remedy():
    refusal = refusal_of(RuntimeError("Capture must end on the same stream it began on."))
    assert (refusal.hazard, refusal.operation) == ("unknown-op", "")
    assert "wait_stream both ways" in refusal.fix


def test_a_call_that_leaves_its_stream_before_anything_else_is_not_merely_called_empty(cuda, capture, other):
    def model(x):
        cuda.set_stream(other)
        return x if cuda.capturing else x + 1

    with pytest.raises(CaptureRefusal, match=r"^Capture must end on the same stream"):
        capture(model)
    assert_fit(cuda, capture)


def test_a_refusal_in_the_middle_of_another_stream_leaves_the_process_fit(cuda, capture, other):
    def model(x):
        before = cuda.current_stream()
        cuda.set_stream(other)
        factor = x.sum().item()  # refused, so that the line below never runs
        cuda.set_stream(before)
        return x * factor

    with pytest.raises(CaptureRefusal) as raised:
        capture(model)
    assert raised.value.text == REFUSED.splitlines()[0].removeprefix("CUDA error: ")
    assert raised.value.site.line == model.__code__.co_firstlineno + 3
    assert_fit(cuda, capture)


def test_a_stream_that_is_given_back_is_no_trouble(cuda, capture, other):
    def model(x):
        with cuda.stream(other):
            y = x + 1
        return y * 2

    assert capture(model)(torch.ones(2)).tolist() == [4.0, 4.0]


# Other GPUs


def test_every_call_concerns_the_backends_own_gpu_whichever_is_current():
    cuda = FakeCuda(allocator="cudaMallocAsync")
    backend = CudaBackend(1, cuda=cuda, device="cpu")
    with backend.pool() as pool:
        graph = capture_in(pool, adds_one)
        with pytest.raises(CaptureRefusal):
            capture_in(pool, reads_a_scalar)
        graph.replay()
    backend.event_timer().time_ns(lambda: None)
    backend.order_after(None)
    backend.synchronize()
    backend.set_rng_state(backend.rng_state())
    asked = {what for what, _ in cuda.touched}
    assert asked >= {"Stream", "capture_begin", "end_allocation", "release_pool", "memory_reserved", "Event"}
    assert [(what, gpu) for what, gpu in cuda.touched if gpu != 1] == []
    assert cuda.current_device() == 0


def test_what_runs_on_a_gpu_runs_with_that_one_as_the_current_one():
    cuda = FakeCuda()
    with CudaBackend(1, cuda=cuda, device="cpu").running():
        assert cuda.current_device() == 1
    with cuda.device(2):
        assert CudaBackend(cuda=cuda).device == "cuda:2"


# Other threads


class Hold:
    """A lock that only writes down when it is held."""

    def __init__(self, cuda):
        self.cuda, self.depth = cuda, 0

    def __enter__(self):
        self.depth += 1
        self.cuda.note("hold")

    def __exit__(self, *exc_info):
        self.depth -= 1
        self.cuda.note("release")


@pytest.fixture
def hold(cuda, monkeypatch):
    hold = Hold(cuda)
    monkeypatch.setattr(Gpu, "capture_lock", hold)
    return hold


def test_from_its_first_warm_up_to_its_last_wait_a_capture_holds_off_every_other(capture, cuda, hold):
    depths = []
    capture(lambda x: (depths.append(hold.depth), x + 1)[1])
    assert depths == [1] * 4
    assert (cuda.calls[0], cuda.calls[-1], hold.depth) == ("hold", "release", 0)


def test_a_capture_that_is_refused_lets_the_others_go_on(capture, hold):
    with pytest.raises(CaptureRefusal):
        capture(reads_a_scalar)
    assert hold.depth == 0


def test_a_wait_for_the_device_waits_for_a_capture_first(backend, capture, cuda, hold):
    backend.synchronize()
    assert cuda.calls == ["hold", "synchronize", "release"]
    graph = capture(adds_one)
    cuda.calls.clear()
    graph.close()
    assert cuda.calls == ["hold", "synchronize", "release", "reset"]


def test_a_replay_waits_for_no_capture(capture, cuda, hold):
    graph = capture(adds_one)
    cuda.calls.clear()
    graph(torch.zeros(2))
    assert cuda.calls == ["replay"]


def test_captures_of_a_process_come_one_at_a_time_whichever_backend_makes_them(cuda, capture):
    elsewhere, free = Gpu(FakeCuda(), 0, "cpu"), []

    def try_to_begin():
        is_free = elsewhere.capture_lock.acquire(blocking=False)
        if is_free:
            elsewhere.capture_lock.release()
        free.append(is_free)

    def in_a_thread():
        thread = threading.Thread(target=try_to_begin)
        thread.start()
        thread.join()

    def model(x):
        if cuda.capturing:
            in_a_thread()
        return x + 1

    capture(model)
    in_a_thread()
    assert free == [False, True]


def test_a_capture_may_wait_for_its_own_device(cuda):
    captures = Gpu(cuda, 0, "cpu").capture_lock
    with captures:
        is_free = captures.acquire(blocking=False)
        captures.release()
    assert is_free
