"""Calls of the CUDA runtime by ctypes: its handles, captures, events and error codes, as NVIDIA documents them."""

from __future__ import annotations

import ctypes

import cuda_emulator
import pytest
import torch

INVALID_VALUE, INVALID_HANDLE, ILLEGAL_STATE = 1, 400, 401
CAPTURE_INVALIDATED, CAPTURE_UNSUPPORTED, IMPLICIT = 901, 900, 906
NON_BLOCKING, RELAXED = 1, 2
ACTIVE = 1


@pytest.fixture
def runtime():
    torch.ones(1, device="cuda")
    yield cuda_emulator._runtime()
    cuda_emulator._runtime().cudaGetLastError()


def made(function, *arguments):
    """What a function of CUDA gives through its first argument."""
    out = ctypes.c_void_p()
    assert function(ctypes.byref(out), *arguments) == 0
    return out


def ended(runtime, stream):
    graph = ctypes.c_void_p()
    return runtime.cudaStreamEndCapture(stream, ctypes.byref(graph)), graph


def graph_with_a_node(runtime):
    stream = made(runtime.cudaStreamCreateWithFlags, NON_BLOCKING)
    assert runtime.cudaStreamBeginCapture(stream, RELAXED) == 0
    held = torch.ones(4, device="cuda")
    assert runtime.cudaMemsetAsync(ctypes.c_void_p(held.data_ptr()), 0, ctypes.c_size_t(16), stream) == 0
    code, graph = ended(runtime, stream)
    assert code == 0
    return stream, graph, held


# --- handles


def test_a_handle_of_a_destroyed_stream_stays_an_error(runtime):
    first = made(runtime.cudaStreamCreateWithFlags, NON_BLOCKING)
    assert runtime.cudaStreamDestroy(first) == 0
    others = [made(runtime.cudaStreamCreateWithFlags, NON_BLOCKING) for _ in range(50)]
    assert first.value not in [other.value for other in others]
    assert runtime.cudaStreamSynchronize(first) == INVALID_HANDLE


def test_a_handle_of_a_destroyed_event_stays_an_error(runtime):
    first = made(runtime.cudaEventCreateWithFlags, 0)
    assert runtime.cudaEventDestroy(first) == 0
    others = [made(runtime.cudaEventCreateWithFlags, 0) for _ in range(50)]
    assert first.value not in [other.value for other in others]
    assert runtime.cudaEventRecord(first, None) == INVALID_HANDLE
    assert runtime.cudaEventDestroy(first) == INVALID_HANDLE


def test_handles_of_a_destroyed_graph_and_its_nodes_stay_errors(runtime):
    stream, graph, held = graph_with_a_node(runtime)
    node, count = ctypes.c_void_p(), ctypes.c_size_t(1)
    assert runtime.cudaGraphGetNodes(graph, ctypes.byref(node), ctypes.byref(count)) == 0
    kind = ctypes.c_int()
    assert runtime.cuGraphNodeGetType(node, ctypes.byref(kind)) == 0
    instance = made(runtime.cudaGraphInstantiateWithFlags, graph, ctypes.c_ulonglong(0))
    assert runtime.cudaGraphDestroy(graph) == 0
    assert runtime.cudaGraphDestroy(graph) == INVALID_VALUE
    assert runtime.cuGraphNodeGetType(node, ctypes.byref(kind)) == INVALID_VALUE
    assert runtime.cudaGraphLaunch(instance, stream) == 0  # the instance needs no graph
    assert held.sum().item() == 0
    assert runtime.cudaGraphExecDestroy(instance) == 0
    assert runtime.cudaGraphExecDestroy(instance) == INVALID_VALUE
    assert runtime.cudaGraphLaunch(instance, stream) == INVALID_VALUE


def test_a_handle_of_another_kind_is_an_error(runtime):
    stream = made(runtime.cudaStreamCreateWithFlags, NON_BLOCKING)
    assert runtime.cudaEventRecord(stream, None) == INVALID_HANDLE
    assert runtime.cudaGraphLaunch(stream, None) == INVALID_VALUE


# --- captures


def test_a_side_stream_destroyed_while_it_captures_ends_the_capture(runtime):
    main = made(runtime.cudaStreamCreateWithFlags, NON_BLOCKING)
    side = made(runtime.cudaStreamCreateWithFlags, NON_BLOCKING)
    event = made(runtime.cudaEventCreateWithFlags, 2)
    assert runtime.cudaStreamBeginCapture(main, RELAXED) == 0
    assert runtime.cudaEventRecord(event, main) == 0
    assert runtime.cudaStreamWaitEvent(side, event, 0) == 0
    assert runtime.cudaStreamDestroy(side) == 0
    others = [made(runtime.cudaStreamCreateWithFlags, NON_BLOCKING) for _ in range(50)]
    assert runtime.cudaStreamBeginCapture(others[0], RELAXED) == 0
    assert ended(runtime, main)[0] == CAPTURE_INVALIDATED
    assert ended(runtime, others[0])[0] == 0  # it has a capture of its own


def test_a_capture_whose_first_stream_is_destroyed_blocks_nothing(runtime):
    stream = made(runtime.cudaStreamCreateWithFlags, NON_BLOCKING)
    assert runtime.cudaStreamBeginCapture(stream, 0) == 0
    assert runtime.cudaStreamDestroy(stream) == 0
    address = made(runtime.cudaMalloc, ctypes.c_size_t(16))
    assert runtime.cudaFree(address) == 0


def test_a_question_to_the_legacy_stream_does_not_end_the_capture(runtime):
    stream, status = made(runtime.cudaStreamCreate), ctypes.c_int()
    assert runtime.cudaStreamBeginCapture(stream, RELAXED) == 0
    assert runtime.cudaStreamIsCapturing(None, ctypes.byref(status)) == IMPLICIT
    assert runtime.cudaStreamIsCapturing(stream, ctypes.byref(status)) == 0
    assert status.value == ACTIVE
    assert ended(runtime, stream)[0] == 0


# --- codes of errors


def test_memory_is_registered_once_and_unregistered_once(runtime):
    memory = torch.ones(4096)
    address, size = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(4096)
    assert [runtime.cudaHostRegister(address, size, 0) for _ in range(2)] == [0, 712]
    assert [runtime.cudaHostUnregister(address) for _ in range(2)] == [0, 713]
    runtime.cudaGetErrorName.restype = ctypes.c_char_p
    assert runtime.cudaGetErrorName(712) == b"cudaErrorHostMemoryAlreadyRegistered"


# --- events outside a graph


def test_a_graph_waits_for_an_event_that_another_graph_records():
    for seed in range(20):
        with cuda_emulator.asynchronous(seed):
            source, target = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
            event = torch.cuda.Event(external=True)
            records, waits = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(records, capture_error_mode="relaxed"):
                source.fill_(1)
                event.record()
            with torch.cuda.graph(waits, capture_error_mode="relaxed"):
                event.wait()
                target.copy_(source)
            torch.cuda.synchronize()
            first, second = torch.cuda.Stream(), torch.cuda.Stream()
            with torch.cuda.stream(first):
                records.replay()
            with torch.cuda.stream(second):
                waits.replay()
            second.synchronize()
            assert target.tolist() == [1, 1, 1, 1], seed


def test_an_event_that_a_replay_records_is_waited_for():
    for seed in range(20):
        with cuda_emulator.asynchronous(seed):
            pinned = torch.zeros(4).pin_memory()
            rows = torch.zeros(4, device="cuda")
            event, graph = torch.cuda.Event(external=True), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="relaxed"):
                rows.fill_(1)
                pinned.copy_(rows, non_blocking=True)
                event.record()
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):
                graph.replay()
            event.synchronize()
            assert pinned.tolist() == [1, 1, 1, 1], seed


# --- time


def test_a_sleep_takes_its_cycles_and_computes_nothing():
    before = cuda_emulator.unknown_launches()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    torch.cuda._sleep(2_000_000)
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) >= 2
    assert cuda_emulator.unknown_launches() == before


def test_an_event_behind_a_sleep_is_not_ready():
    for seed in range(20):
        with cuda_emulator.asynchronous(seed):
            event = torch.cuda.Event()
            torch.cuda._sleep(20_000_000)
            event.record()
            assert not event.query()
            event.synchronize()
            assert event.query()
