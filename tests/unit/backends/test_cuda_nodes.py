"""Counting the nodes of a kept graph through NVIDIA's bindings, which are faked here."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tests.fake_cuda import FakeCuda

from pytest_cudagraph.backends.cuda import CudaBackend
from pytest_cudagraph.backends.cuda.nodes import (
    NO_COUNTER,
    NOT_KEPT,
    Bindings,
    NodeCount,
    count_nodes,
    load_bindings,
    short_kernel_name,
)

ADD = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15CUDAFunctor_addIfEESt5arrayIPcLm3EEEEviT0_T1_"
MUL = (
    "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_13AUnaryFunctorIfffNS0_15binary_internal10MulFunctorIfEEEE"
    "St5arrayIPcLm2EEEEviT0_T1_"
)
KINDS = SimpleNamespace(
    cudaGraphNodeTypeKernel=0, cudaGraphNodeTypeMemcpy=1, cudaGraphNodeTypeMemset=2, cudaGraphNodeTypeGraph=4
)
WAIT_EVENT = 6


class Runtime:
    """``cuda.bindings.runtime`` for a graph of ``nodes``: (kind, kernel name)."""

    cudaGraphNodeType = KINDS

    def __init__(self, nodes, error=0):
        self.nodes, self.error = nodes, error

    def cudaGraphGetNodes(self, raw, numNodes=0):
        return self.error, list(range(numNodes)), len(self.nodes)

    def cudaGraphNodeGetType(self, node):
        return 0, self.nodes[node][0]


class Driver:
    def __init__(self, nodes, params_error=0, name_error=0):
        self.nodes, self.params_error, self.name_error = nodes, params_error, name_error

    def CUgraphNode(self, init_value):
        return init_value

    def CUfunction(self, init_value):
        return init_value

    def cuGraphKernelNodeGetParams(self, node):
        return self.params_error, SimpleNamespace(func=100 + node)

    def cuFuncGetName(self, function):
        return self.name_error, self.nodes[function - 100][1].encode()


def receipt(runtime, driver):
    backend = CudaBackend(cuda=FakeCuda(keeps_graphs=True), device="cpu", node_source=Bindings(runtime, driver))
    return backend.pool().capture(lambda x: x + 1, (torch.ones(2),), {}, batch_size=2).receipt


def test_kernels_copies_and_fills_are_counted_by_name_and_events_only_as_nodes():
    nodes = [(0, ADD), (0, MUL), (0, ADD), (0, "triton_poi_fused_0"), (1, ""), (2, ""), (WAIT_EVENT, "")]
    found = receipt(Runtime(nodes), Driver(nodes))
    assert found.operations == 7
    assert found.kernels == 6
    assert found.kernel_names == {
        "memcpy": 1,
        "memset": 1,
        "triton_poi_fused_0": 1,
        "vectorized_elementwise_kernel<CUDAFunctor_add>": 2,
        "vectorized_elementwise_kernel<MulFunctor>": 1,
    }


def test_a_kept_graph_is_instantiated_before_its_first_launch():
    cuda = FakeCuda(keeps_graphs=True)
    backend = CudaBackend(cuda=cuda, device="cpu", node_source=Bindings(Runtime([]), Driver([])))
    backend.pool().capture(lambda x: x + 1, (torch.ones(2),), {}, batch_size=2)
    assert "new_graph kept" in cuda.calls
    assert cuda.names().index("capture_end") < cuda.names().index("instantiate")


def test_a_torch_that_keeps_no_graphs_is_not_asked_to():
    backend = CudaBackend(cuda=FakeCuda(), device="cpu", node_source=Bindings(Runtime([(0, ADD)]), Driver([])))
    found = backend.pool().capture(lambda x: x + 1, (torch.ones(2),), {}, batch_size=2).receipt
    assert (found.operations, found.kernels) == (None, None)


@pytest.mark.parametrize("driver", [{"params_error": 1}, {"name_error": 1}])
def test_a_kernel_without_a_name_is_still_counted(driver):
    nodes = [(0, ADD)]
    assert receipt(Runtime(nodes), Driver(nodes, **driver)).kernel_names == {"kernel": 1}


def test_nothing_is_counted_when_the_driver_does_not_list_the_nodes_and_the_receipt_says_why():
    found = receipt(Runtime([(0, ADD)], error=1), Driver([]))
    assert (found.operations, found.kernels, found.kernel_names) == (None, None, {})
    assert found.not_counted.startswith("the driver does not list the nodes of this graph")


def test_bindings_of_another_version_cost_the_count_and_not_the_capture():
    found = receipt(SimpleNamespace(), SimpleNamespace())
    assert (found.operations, found.kernels) == (None, None)


def test_bindings_that_are_not_installed_are_none():
    assert load_bindings() is None


@pytest.mark.parametrize(
    ("mangled", "short"),
    [
        (ADD, "vectorized_elementwise_kernel<CUDAFunctor_add>"),
        (MUL, "vectorized_elementwise_kernel<MulFunctor>"),
        ("_Z13simple_kernelPf", "simple_kernel"),
        ("_ZN7cutlass7Kernel2I12GemmIdentityEEvT_", "Kernel2"),
        ("ampere_sgemm_32x32_sliced1x4_nn", "ampere_sgemm_32x32_sliced1x4_nn"),
        ("_ZTV", "_ZTV"),
        ("", ""),
        ("_ZN99too_long", "too_long"),
    ],
)
def test_mangled_names_are_shortened_to_kernel_and_functor(mangled, short):
    assert short_kernel_name(mangled) == short


class Nested(Runtime):
    """Graph 1 holds an addition and a child graph, 7, of two more."""

    def cudaGraphGetNodes(self, raw, numNodes=0):
        nodes = ["add", "add"] if raw == 7 else ["add", "child"]
        return 0, nodes, len(nodes)

    def cudaGraphNodeGetType(self, node):
        return 0, 4 if node == "child" else 0

    def cudaGraphChildGraphNodeGetGraph(self, node):
        return self.error, 7


class NamesNothing:
    def CUgraphNode(self, init_value):
        return init_value

    def cuGraphKernelNodeGetParams(self, node):
        return 1, None


@pytest.mark.parametrize(("error", "nodes"), [(0, 4), (1, None)])
def test_kernels_inside_of_a_child_graph_are_counted_or_nothing_is(error, nodes, monkeypatch):
    source = Bindings(Nested([], error), NamesNothing())
    monkeypatch.setattr(source, "kernel_name", lambda node: ADD)
    backend = CudaBackend(cuda=FakeCuda(keeps_graphs=True), device="cpu", node_source=source)
    found = backend.pool().capture(lambda x: x + 1, (torch.ones(2),), {}, batch_size=2).receipt
    assert (found.operations, found.kernels) == (nodes, 3 if nodes else None)
    assert bool(found.not_counted) is bool(error)


@pytest.mark.parametrize(("kern", "name"), [(5, "vectorized_elementwise_kernel<CUDAFunctor_add>"), (0, "kernel")])
def test_a_kernel_node_without_a_function_is_named_by_its_kernel(kern, name):
    class ByKernel(Driver):
        def cuGraphKernelNodeGetParams(self, node):
            return 0, SimpleNamespace(func=0, kern=kern)

        def cuKernelGetName(self, kernel):
            return 0, ADD.encode()

    nodes = [(0, ADD)]
    assert receipt(Runtime(nodes), ByKernel(nodes)).kernel_names == {name: 1}


class SilentRuntime:
    cudaGraphNodeType = KINDS

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
    found = count_nodes(Raw(), Bindings(SilentRuntime(0), None))
    assert (found.nodes, found.kernels, found.why) == (0, 0, "")


@pytest.mark.parametrize("errors", [(1, 0), (0, 1)])
def test_a_driver_that_fails_at_either_question_leaves_the_count_open_and_says_why(errors):
    found = count_nodes(Raw(), Bindings(SilentRuntime(2, errors), None))
    assert (found.nodes, found.kernels) == (None, None)
    assert found.why == "the driver does not list the nodes of this graph (RuntimeError: cudaGraphGetNodes: 1)"


def test_a_node_of_unknown_kind_is_a_node_and_no_kernel():
    found = count_nodes(Raw(), Bindings(SilentRuntime(2, type_error=1), None))
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
