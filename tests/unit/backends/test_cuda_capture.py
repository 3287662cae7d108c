"""Capture and replay on the fake: order of calls, inputs, outputs, clean-up when all goes well."""

import gc
import threading

import pytest
import torch
from tests.fake_cuda import FakeCuda

from pytest_cudagraph.backends.cuda.gpu import Gpu
from pytest_cudagraph.backends.cuda.pool import own_outputs
from pytest_cudagraph.errors import CaptureRefusal, CudagraphError, InputError

pytestmark = pytest.mark.usefixtures("no_collections")


def scale(x, *, factor=2.0, shift=None):
    y = x * factor
    return {"y": y if shift is None else y + shift}


def capture(backend, model, *args, batch_size=4, **kwargs):
    return backend.pool().capture(model, args, kwargs, batch_size=batch_size)


def test_warm_up_runs_on_the_capture_stream_between_two_waits_and_before_the_capture(backend, cuda, one_thread):
    def model(x):
        cuda.note("model", cuda.stream_now.name)
        return x + 1

    capture(backend, model, torch.ones(4))
    warm_up = ["wait_stream side after caller", *["model side"] * 3, "wait_stream caller after side", "synchronize"]
    recording = [
        "empty_cache",  # before memory is read
        "wait_stream side after caller",
        "synchronize",
        "empty_cache",  # torch's own, in torch.cuda.graph
        "capture_begin side global",
        "model side",
        "capture_end",
        "wait_stream caller after side",
        "synchronize",
    ]
    assert cuda.calls == warm_up + recording


def test_a_replay_computes_on_new_inputs_and_returns_the_same_objects(backend):
    graph = capture(backend, scale, torch.ones(4), factor=3.0)
    first = graph(torch.full((4,), 5.0), factor=3.0)
    assert first["y"].tolist() == [15.0] * 4
    second = graph(torch.full((4,), 7.0), factor=3.0)
    assert second is first
    assert second["y"].tolist() == [21.0] * 4
    assert graph.replays == 2


def test_a_replay_without_arguments_runs_on_the_example_even_if_the_model_writes_to_its_input(backend):
    graph = capture(backend, lambda x: x.add_(1) * 2, torch.zeros(2))
    # The fake executes while it captures: CUDA would give 2 here, from an input of 0.
    assert graph.replay().tolist() == [4.0, 4.0]


def test_a_replay_neither_waits_nor_calls_python_of_the_model(backend, cuda):
    calls = []

    def model(x):
        calls.append(1)
        return x + 1

    graph = capture(backend, model, torch.ones(4))
    cuda.calls.clear()
    calls.clear()
    graph(torch.zeros(4))
    graph.poison()
    graph.replay()
    assert cuda.calls == ["replay", "replay"]
    assert calls == []


def test_the_callers_tensors_are_never_written(backend):
    given = torch.zeros(2)
    graph = capture(backend, lambda x: x.add_(1), given)
    graph(given)
    assert given.tolist() == [0.0, 0.0]


def test_inputs_that_require_grad_can_be_copied_in_outside_inference_mode(backend):
    graph = capture(backend, lambda x: x + 1, torch.zeros(2, requires_grad=True))
    assert graph(torch.ones(2, requires_grad=True)).tolist() == [2.0, 2.0]
    with torch.inference_mode():
        made_in_inference = torch.ones(2) * 2
    assert graph(made_in_inference).tolist() == [3.0, 3.0]


PAD = "pad the inputs to the captured shape, or capture another graph"
ANOTHER = "capture another graph for this value, or make the argument a tensor"
CAPTURED = "args[0]: the graph was captured for float32 (4,) on cpu; this call gives"
BAKED = "kwargs['factor']: 2.0 is baked into the graph; this call gives"
NAMED = "the graph was captured for args[0], kwargs['factor']; this call gives"


@pytest.mark.parametrize(
    ("x", "factor", "text"),
    [
        (torch.ones(3), 2.0, f"{CAPTURED} float32 (3,) on cpu\n{PAD}"),
        (torch.ones(4, dtype=torch.int32), 2.0, f"{CAPTURED} int32 (4,) on cpu\n{PAD}"),
        (torch.ones(4, device="meta"), 2.0, f"{CAPTURED} float32 (4,) on meta\n{PAD}"),
        (5.0, 2.0, f"{CAPTURED} 5.0\n{PAD}"),
        (torch.ones(4), 3.0, f"{BAKED} 3.0\n{ANOTHER}"),
        (torch.ones(4), 2, f"{BAKED} 2\n{ANOTHER}"),
        (torch.ones(4), torch.tensor(2.0), f"{BAKED} float32 () on cpu\n{ANOTHER}"),
        (torch.ones(4), None, f"{NAMED} args[0]\n{PAD}"),
        ([torch.ones(4)], 2.0, f"{NAMED} args[0][0], kwargs['factor']\n{PAD}"),
    ],
)
def test_a_call_that_does_not_fit_is_refused_by_name_and_not_launched(backend, cuda, x, factor, text):
    graph = capture(backend, scale, torch.ones(4), factor=2.0)
    with pytest.raises(InputError) as raised:
        graph(x, **{} if factor is None else {"factor": factor})
    assert str(raised.value) == text
    assert graph.replays == 0


def test_nothing_is_copied_when_a_later_argument_does_not_fit(backend):
    graph = capture(backend, lambda x, y: x + y, torch.zeros(2), torch.zeros(2))
    with pytest.raises(InputError, match=r"args\[1\]"):
        graph(torch.ones(2), torch.ones(3))
    assert graph.replay().tolist() == [0.0, 0.0]


def test_lists_and_tuples_of_the_same_tensors_are_told_apart(backend):
    graph = capture(backend, lambda xs: xs[0] + 1, [torch.ones(2)])
    with pytest.raises(InputError, match="containers of the arguments have other types"):
        graph((torch.ones(2),))


def test_tensors_on_another_device_are_refused_before_the_capture(backend):
    with pytest.raises(InputError) as raised:
        capture(backend, scale, torch.ones(4), shift=torch.ones(4, device="meta"))
    assert str(raised.value) == (
        "kwargs['shift']: a graph on cpu takes tensors on cpu; this one is float32 (4,) on meta\n"
        "move it with .to('cpu') before the call, or pass a plain number"
    )


def test_poison_fills_outputs_and_a_replay_brings_them_back(backend):
    def model(x):
        return x + 1, (x > 0), x.to(torch.int32) + 1

    graph = capture(backend, model, torch.ones(3))
    numbers, flags, integers = graph.replay()
    graph.poison()
    assert numbers.isnan().all()
    assert flags.all()
    assert (integers == torch.iinfo(torch.int32).max).all()
    numbers, flags, integers = graph(torch.zeros(3))
    assert numbers.tolist() == [1.0] * 3
    assert not flags.any()
    assert integers.tolist() == [1] * 3


def test_poison_spares_inputs_parameters_and_tensors_held_elsewhere(backend):
    layer = torch.nn.Linear(2, 2, bias=False)
    held = torch.full((2,), 7.0)
    weight = layer.weight.detach().clone()

    def model(x):
        return layer(x), layer.weight, held, x, x.view(-1)

    graph = capture(backend, model, torch.ones(1, 2))
    output = graph.replay()
    graph.poison()
    assert output[0].isnan().all()
    assert torch.equal(layer.weight, weight)
    assert held.tolist() == [7.0, 7.0]
    assert output[3].tolist() == [[1.0, 1.0]]


class Snapshot(FakeCuda):
    def __init__(self, segments):
        super().__init__()
        self.segments = segments

    def memory_snapshot(self):
        return self.segments


def owned(outputs, **segment):
    base = outputs[0].untyped_storage()
    found = {"address": base.data_ptr(), "total_size": base.nbytes(), "segment_pool_id": (0, 1), **segment}
    return own_outputs(Gpu(Snapshot([found]), 0, "cpu"), (0, 1), outputs)


def test_an_allocator_that_names_no_pool_owns_nothing():
    assert owned([torch.ones(4)], segment_pool_id=()) == []
    without = own_outputs(Gpu(Snapshot([{"address": 0, "total_size": 2**62}]), 0, "cpu"), (0, 1), [torch.ones(4)])
    assert without == []


def test_memory_of_another_pool_is_not_owned():
    assert owned([torch.ones(4)], segment_pool_id=(0, 2)) == []


def test_the_same_output_twice_is_owned_once_and_views_of_it_each():
    tensor = torch.ones(4)
    assert [each.shape for each in owned([tensor, tensor, tensor[:2], tensor[4:]])] == [(4,), (2,)]


def test_an_output_right_behind_the_segment_is_not_owned():
    tensor = torch.ones(4)
    assert owned([tensor, tensor[2:]], total_size=8) == [tensor]


def test_an_output_without_memory_of_its_own_is_not_owned_and_breaks_nothing():
    tensor = torch.ones(4)
    assert owned([tensor, tensor.to_sparse()]) == [tensor]


def test_an_expanded_output_is_poisoned_and_brought_back(backend):
    graph = capture(backend, lambda x: (x + 1).expand(3, 2), torch.ones(2))
    output = graph.replay()
    graph.poison()
    assert output.isnan().all()
    assert graph.replay().tolist() == [[2.0, 2.0]] * 3


def test_an_output_without_a_tensor_is_refused_before_anything_is_captured(backend, cuda):
    with pytest.raises(InputError, match="holds no tensor that a replay could renew"):
        capture(backend, lambda x: None, torch.ones(2))
    assert "capture_begin" not in cuda.names()


def test_the_receipt_tells_size_and_time_but_no_kernels_where_nothing_can_count_them(backend):
    receipt = capture(backend, lambda x: x + 1, torch.ones(1000), batch_size=8).receipt
    assert receipt.batch_size == 8
    assert receipt.memory_bytes == 4000
    assert receipt.capture_ns > 0
    assert (receipt.operations, receipt.kernels, receipt.kernel_names) == (None, None, {})


def test_the_graphs_of_a_pool_share_its_handle_while_one_is_open(backend, cuda):
    with backend.pool() as pool:
        first = pool.capture(lambda x: x + 1, (torch.ones(2),), {}, batch_size=2)
        second = pool.capture(lambda x: x + 1, (torch.ones(1),), {}, batch_size=1)
        handle = cuda.graphs[0].handle
        assert [graph.handle for graph in cuda.graphs] == [handle, handle]
        first.close()
        second.close()
        # A handle whose graphs are all gone is dead: torch asserts on it.
        pool.capture(lambda x: x + 1, (torch.ones(1),), {}, batch_size=1)
        assert cuda.graphs[0].handle != handle


def test_leaving_the_pool_closes_every_graph_after_waiting_for_the_device(backend, cuda):
    with backend.pool() as pool:
        graph = pool.capture(lambda x: x + 1, (torch.ones(2),), {}, batch_size=2)
        cuda.calls.clear()
    assert cuda.calls == ["synchronize", "reset"]
    assert cuda.graphs == []
    pool.close()
    graph.close()
    assert cuda.calls == ["synchronize", "reset"]


def test_a_closed_cuda_graph_says_so(backend):
    graph = capture(backend, lambda x: x + 1, torch.ones(2), batch_size=2)
    graph.close()
    for use in (lambda: graph(torch.ones(2)), graph.replay, graph.poison):
        with pytest.raises(CudagraphError, match=r"^the graph of batch size 2 is closed; capture it again$"):
            use()


def test_a_closed_pool_takes_no_graph(backend):
    pool = backend.pool()
    pool.close()
    with pytest.raises(CudagraphError, match=r"^this graph pool is closed; open another one$"):
        pool.capture(lambda x: x, (torch.ones(2),), {}, batch_size=2)


def test_every_graph_is_released_even_if_waiting_for_the_device_fails(backend, cuda):
    pool = backend.pool()
    for size in (2, 1):
        pool.capture(lambda x: x + 1, (torch.ones(size),), {}, batch_size=size)
    cuda.failures["synchronize"] = [RuntimeError("first"), RuntimeError("second")]
    with pytest.raises(RuntimeError, match="first"):
        pool.close()
    assert cuda.graphs == []


def test_the_heap_is_frozen_during_the_capture_only(backend, monkeypatch):
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
    order = []
    for name in ("collect", "freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda name=name: order.append(name))
    capture(backend, lambda x: (order.append("model"), x + 1)[1], torch.ones(2))
    assert order == ["model"] * 3 + ["collect", "freeze", "model", "unfreeze"]


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_heap_someone_else_froze_stays_frozen_and_the_collector_as_it_was(backend, monkeypatch, is_enabled):
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 12)
    monkeypatch.setattr(gc, "unfreeze", lambda: pytest.fail("that was not ours to unfreeze"))
    enabled = []
    (gc.enable if is_enabled else gc.disable)()
    try:
        capture(backend, lambda x: (enabled.append(gc.isenabled()), x + 1)[1], torch.ones(2))
        assert enabled == [*[is_enabled] * 3, False]
        assert gc.isenabled() is is_enabled
    finally:
        gc.enable()


def test_autocast_does_not_cache_weights_in_warm_up_or_capture(backend):
    cached = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        capture(backend, lambda x: (cached.append(torch.is_autocast_cache_enabled()), x + 1)[1], torch.ones(2))
        assert torch.is_autocast_cache_enabled()
    assert cached == [False] * 4


def test_other_live_threads_are_kept_out_of_the_capture(backend, cuda):
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        capture(backend, lambda x: x + 1, torch.ones(2))
    finally:
        stop.set()
        thread.join()
    assert "capture_begin side thread_local" in cuda.calls


def test_a_graph_without_a_single_node_is_refused_in_torchs_words(backend, cuda):
    with backend.pool() as pool:
        with pytest.raises(CaptureRefusal) as raised:
            pool.capture(lambda x: x, (torch.ones(2),), {}, batch_size=2)
        assert raised.value.text == "The CUDA Graph is empty. This usually means"
        assert raised.value.hazard == ""
        assert raised.value.fix == "give the fixture a callable that computes on its inputs with torch"
        assert pool.capture(lambda x: x + 1, (torch.ones(2),), {}, batch_size=2).replay().tolist() == [2.0, 2.0]
    assert set(cuda.shares.values()) == {0}


def test_model_and_capture_run_in_inference_mode_but_torchs_own_tensors_are_made_outside(backend, cuda):
    modes = []
    begin = cuda.CUDAGraph.capture_begin
    cuda.CUDAGraph.capture_begin = lambda graph, *args: (
        modes.append(("begin", torch.is_inference_mode_enabled())),
        begin(graph, *args),
    )[1]
    capture(backend, lambda x: (modes.append(("model", torch.is_inference_mode_enabled())), x + 1)[1], torch.ones(2))
    assert modes == [("model", True)] * 3 + [("begin", False), ("model", True)]


def test_a_replay_launches_in_inference_mode_wherever_it_is_called(backend, cuda):
    graph = capture(backend, lambda x: x + 1, torch.ones(2))
    modes = []
    cuda.graphs[0].replay = lambda: modes.append(torch.is_inference_mode_enabled())
    graph.replay()
    with torch.inference_mode():
        graph.replay()
    assert modes == [True, True]
    assert not torch.is_inference_mode_enabled()


def test_a_model_that_takes_its_arguments_out_of_a_dict_finds_them_at_every_call(backend):
    graph = capture(backend, lambda batch: batch.pop("x") + 1, {"x": torch.ones(2)})
    assert graph({"x": torch.zeros(2)}).tolist() == [1.0, 1.0]
