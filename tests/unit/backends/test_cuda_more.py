"""Branches of the CUDA backend that need an odd machine: an older torch, silent bindings, a frozen heap."""

import gc
import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tests.fake_cuda import REFUSED, FakeCuda, FakeStream

from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.backends.cuda import CudaBackend, refusals
from pytest_cudagraph.backends.cuda.gpu import Gpu, heap_frozen
from pytest_cudagraph.backends.cuda.nodes import NO_COUNTER, NOT_KEPT, Bindings, NodeCount, count_nodes, load_bindings
from pytest_cudagraph.backends.cuda.pool import own_outputs
from pytest_cudagraph.errors import CaptureRefusal, InputError

pytestmark = pytest.mark.usefixtures("no_collections")


def capture(pool, model):
    return pool.capture(model, (torch.ones(2),), {}, batch_size=2)


def reads_a_scalar(x):
    return x * x.sum().item()


# Which backend


def test_a_backend_is_opened_by_its_kind(monkeypatch):
    opened = []
    monkeypatch.setattr("pytest_cudagraph.backends.cuda.CudaBackend", lambda: opened.append("cuda"))
    open_backend("cuda")
    assert opened == ["cuda"]
    assert open_backend("cpu").kind == "cpu"
    with pytest.raises(ValueError, match=r"^a backend is 'cuda' or 'cpu', not 'tpu'$"):
        open_backend("tpu")


def test_the_current_stream_waits_for_an_earlier_one_only_if_that_is_another(cuda):
    backend = CudaBackend(cuda=cuda, device="cpu")
    current = backend.order_after(None)
    assert backend.order_after(current) is current is cuda.stream_now
    assert cuda.calls == []
    assert backend.order_after(FakeStream(cuda, "earlier")) is current
    assert cuda.calls == ["wait_stream caller after earlier"]


# Naming the refused operation


def test_a_diagnosis_in_which_the_model_raises_still_names_what_came_first():
    def call():
        torch.ones(2).sum().item()
        raise KeyError("later")

    found = refusals.diagnose(call, lambda: 0)
    assert found.hazard == "host-sync"
    assert found.site.line == call.__code__.co_firstlineno + 1


def test_a_refusal_the_catalogue_does_not_know_is_told_in_cudas_words(cuda, pool):
    def model(x):
        if cuda.capturing:
            cuda.is_invalidated = True
            raise RuntimeError(REFUSED)
        return x + 1

    with pytest.raises(CaptureRefusal) as raised:
        capture(pool, model)
    assert raised.value.text == "operation not permitted when stream is capturing"
    assert (raised.value.operation, raised.value.hazard) == ("", "host-sync")
    assert raised.value.site.line == model.__code__.co_firstlineno + 3


# Putting the allocator right


@pytest.mark.parametrize("name", ["_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"])
def test_the_allocators_binding_is_found_under_either_name_also_where_torch_cuda_does_not_import_it(
    cuda, pool, monkeypatch, name
):
    monkeypatch.setattr(cuda, "memory", SimpleNamespace())
    monkeypatch.setattr(torch._C, name, cuda._end_allocation, raising=False)
    other = "_cuda_endAllocateToPool" if name.endswith("StreamToPool") else "_cuda_endAllocateCurrentStreamToPool"
    monkeypatch.delattr(torch._C, other, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", cuda._release_pool, raising=False)
    with pytest.raises(CaptureRefusal):
        capture(pool, reads_a_scalar)
    assert cuda.underway == []
    assert capture(pool, lambda x: x + 1).replay().tolist() == [2.0, 2.0]


def test_a_torch_without_the_binding_says_that_it_cannot_capture_any_more(cuda, pool, monkeypatch):
    monkeypatch.setattr(cuda, "memory", SimpleNamespace())
    for name in ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool", "_cuda_releasePool"):
        monkeypatch.delattr(torch._C, name, raising=False)
    with pytest.raises(CaptureRefusal, match=r"^operation not permitted"):
        capture(pool, reads_a_scalar)
    with pytest.raises(CaptureRefusal, match="left this process unable to capture"):
        capture(pool, lambda x: x + 1)


def test_a_share_in_a_pool_that_others_use_is_not_given_back_when_the_allocation_could_not_be_ended(cuda, pool):
    capture(pool, lambda x: x + 1)
    cuda.failures["end_allocation"] = [RuntimeError("not recording")]
    with pytest.raises(CaptureRefusal):
        capture(pool, reads_a_scalar)
    assert "release_pool" not in cuda.names()


# The heap


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_frozen_heap_leaves_the_collector_as_it_was(monkeypatch, is_enabled):
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 12)
    (gc.enable if is_enabled else gc.disable)()
    try:
        with heap_frozen():
            assert not gc.isenabled()
        assert gc.isenabled() is is_enabled
    finally:
        gc.enable()


# Looking into a graph


class Runtime:
    cudaGraphNodeType = SimpleNamespace(cudaGraphNodeTypeKernel=0, cudaGraphNodeTypeMemcpy=1, cudaGraphNodeTypeMemset=2)

    def __init__(self, total, errors=(0, 0), type_error=0):
        self.total, self.errors, self.type_error = total, list(errors), type_error

    def cudaGraphGetNodes(self, raw, numNodes=0):
        return self.errors.pop(0), list(range(numNodes)), self.total

    def cudaGraphNodeGetType(self, node):
        return self.type_error, 1


class Raw:
    def raw_cuda_graph(self):
        return 1


def test_a_graph_without_nodes_counts_none():
    found = count_nodes(Raw(), Bindings(Runtime(0), None))
    assert (found.nodes, found.kernels, found.why) == (0, 0, "")


@pytest.mark.parametrize("errors", [(1, 0), (0, 1)])
def test_a_driver_that_fails_at_either_question_leaves_the_count_open_and_says_why(errors):
    found = count_nodes(Raw(), Bindings(Runtime(2, errors), None))
    assert (found.nodes, found.kernels) == (None, None)
    assert found.why == "the driver does not list the nodes of this graph (RuntimeError: cudaGraphGetNodes: 1)"


def test_a_node_whose_kind_is_not_told_is_a_node_and_no_kernel():
    found = count_nodes(Raw(), Bindings(Runtime(2, type_error=1), None))
    assert (found.nodes, found.kernels) == (2, 0)


def test_nothing_is_counted_without_bindings_or_of_a_torch_that_shows_no_nodes():
    assert count_nodes(Raw(), None) == NodeCount(why=NO_COUNTER)
    assert count_nodes(object(), Bindings(None, None)) == NodeCount(why=NOT_KEPT)


def test_bindings_are_those_of_nvidias_package(monkeypatch):
    package = ModuleType("cuda")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "cuda", package)
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    for name in ("runtime", "driver"):
        monkeypatch.setitem(sys.modules, f"cuda.bindings.{name}", ModuleType(name))
    sys.modules["cuda.bindings.runtime"].cudaGraphGetNodes = lambda graph, numNodes: (0, [], 0)
    assert load_bindings().nodes(1) == []


def test_bindings_whose_driver_library_is_missing_are_none(monkeypatch):
    def import_module(name):
        raise RuntimeError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", import_module)
    assert load_bindings() is None


# Which outputs may be overwritten


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


def test_an_expanded_output_is_poisoned_and_brought_back(pool):
    graph = capture(pool, lambda x: (x + 1).expand(3, 2))
    output = graph.replay()
    graph.poison()
    assert output.isnan().all()
    assert graph.replay().tolist() == [[2.0, 2.0]] * 3


def test_an_output_without_a_tensor_is_refused_before_anything_is_captured(cuda, pool):
    with pytest.raises(InputError, match="holds no tensor that a replay could renew"):
        capture(pool, lambda x: None)
    assert "capture_begin" not in cuda.names()
