"""The nodes of a kept graph are counted by the driver, with a library in Python that fills in as CUDA would."""

import ctypes

import pytest
import torch
from tests.fake_cuda import FakeCuda

from pytest_cudagraph.backends.cuda import CudaBackend
from pytest_cudagraph.backends.cuda.nodes import (
    NO_COUNTER,
    NOT_KEPT,
    DriverLibrary,
    KernelParams,
    NodeCount,
    count_nodes,
    load_driver,
    short_kernel_name,
)

ADD = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15CUDAFunctor_addIfEESt5arrayIPcLm3EEEEviT0_T1_"
MUL = (
    "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_13AUnaryFunctorIfffNS0_15binary_internal10MulFunctorIfEEEE"
    "St5arrayIPcLm2EEEEviT0_T1_"
)

GRAPH, CHILD_GRAPH = 0x7F0000000010, 0x7F0000000020
NODES = {GRAPH: [1, 2, 3, 4, 5], CHILD_GRAPH: [6]}
KINDS = {1: 0, 2: 1, 3: 2, 4: 4, 5: 6, 6: 0}  # kernel, copy, fill, child graph, wait for an event, kernel
FUNCTION, KERNEL = 0x7F0000000030, 0x7F0000000040


class Library:
    """libcuda, as far as it is called; the calls in ``fails`` return an error."""

    def __init__(self, fails=(), function_name=b"triton_poi_fused_0"):
        self.fails, self.function_name = fails, function_name

    def __getattribute__(self, name):
        fails = object.__getattribute__(self, "fails")
        return (lambda *arguments: 700) if name in fails else object.__getattribute__(self, name)

    def cuGraphGetNodes(self, graph, found, total):
        nodes = NODES.get(graph.value, NODES[GRAPH])
        if found is not None and not nodes:
            return 1  # an invalid value: there is room for nothing
        total._obj.value = len(nodes)
        if found is not None:
            found[: len(nodes)] = nodes
        return 0

    def cuGraphNodeGetType(self, node, kind):
        kind._obj.value = KINDS[node.value]
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node, params):
        if node.value == 1:
            params._obj.func = FUNCTION
        else:
            params._obj.kern = KERNEL
        return 0

    def cuFuncGetName(self, name, function):
        assert function.value == FUNCTION
        name._obj.value = self.function_name
        return 0

    def cuKernelGetName(self, name, kernel):
        assert kernel.value == KERNEL
        name._obj.value = b"_Z13simple_kernelPf"
        return 0

    def cuGraphChildGraphNodeGetGraph(self, node, graph):
        graph._obj.value = CHILD_GRAPH
        return 0


class Graph:
    def raw_cuda_graph(self):
        return GRAPH


def counted(*fails):
    return count_nodes(Graph(), DriverLibrary(Library(fails)))


def test_kernels_copies_fills_and_child_graphs_are_counted():
    found = counted()
    assert (found.nodes, found.kernels, found.why) == (6, 4, "")
    assert found.kernel_names == {"memcpy": 1, "memset": 1, "simple_kernel": 1, "triton_poi_fused_0": 1}


@pytest.mark.parametrize("question", ["cuGraphKernelNodeGetParams_v2", "cuFuncGetName", "cuKernelGetName"])
def test_a_driver_that_tells_no_names_still_counts(question):
    found = counted(question)
    assert (found.nodes, found.kernels) == (6, 4)
    assert found.kernel_names["kernel"] >= 1


@pytest.mark.parametrize("question", ["cuGraphGetNodes", "cuGraphNodeGetType", "cuGraphChildGraphNodeGetGraph"])
def test_a_driver_that_does_not_answer_leaves_the_count_open_with_the_reason(question):
    found = counted(question)
    assert (found.nodes, found.kernels) == (None, None)
    assert f"{question}: error 700 of the driver" in found.why


def test_a_graph_without_nodes_holds_none(monkeypatch):
    monkeypatch.setitem(NODES, GRAPH, [])
    found = counted()
    assert (found.nodes, found.kernels, found.why) == (0, 0, "")


def test_a_kernel_node_that_names_neither_function_nor_kernel_still_counts(monkeypatch):
    monkeypatch.setattr(Library, "cuGraphKernelNodeGetParams_v2", lambda self, node, params: 0)
    assert counted().kernel_names == {"kernel": 2, "memcpy": 1, "memset": 1}


def test_an_older_driver_without_the_question_leaves_the_name_open(monkeypatch):
    monkeypatch.delattr(Library, "cuFuncGetName")
    assert counted().kernel_names["kernel"] == 1


def test_the_parameters_of_a_kernel_node_lie_where_cuda_h_puts_them():
    # Pointers are aligned to eight bytes: func 0, seven unsigned integers from 8 to 36, then four pointers.
    offsets = [getattr(KernelParams, name).offset for name in ("func", "grid", "shared_bytes", "params", "kern")]
    assert offsets == [0, 8, 32, 40, 56]
    assert ctypes.sizeof(KernelParams) == 72


def test_a_machine_without_the_driver_has_none():
    assert load_driver("libthere-is-no-such.so.1") is None


def test_the_library_of_the_machine_is_loaded_where_it_is():
    this_process = None
    assert isinstance(load_driver(this_process), DriverLibrary)


def receipt(cuda, library):
    backend = CudaBackend(cuda=cuda, device="cpu", node_source=DriverLibrary(library))
    return backend.pool().capture(lambda x: x + 1, (torch.ones(2),), {}, batch_size=2).receipt


def test_the_receipt_has_the_nodes_and_the_kernels_by_short_names():
    found = receipt(FakeCuda(keeps_graphs=True), Library(function_name=ADD.encode()))
    assert (found.operations, found.kernels) == (6, 4)
    assert found.kernel_names["vectorized_elementwise_kernel<CUDAFunctor_add>"] == 1


def test_a_driver_that_lists_no_nodes_costs_the_count_and_not_the_capture():
    found = receipt(FakeCuda(keeps_graphs=True), Library(["cuGraphGetNodes"]))
    assert (found.operations, found.kernels, found.kernel_names) == (None, None, {})
    assert found.not_counted.startswith("the driver does not list the nodes of this graph")


def test_a_driver_without_the_question_costs_the_count_and_not_the_capture():
    found = receipt(FakeCuda(keeps_graphs=True), object())
    assert (found.operations, found.kernels) == (None, None)


def test_a_kept_graph_is_instantiated_before_its_first_launch():
    cuda = FakeCuda(keeps_graphs=True)
    receipt(cuda, Library())
    assert "new_graph kept" in cuda.calls
    assert cuda.names().index("capture_end") < cuda.names().index("instantiate")


def test_a_torch_that_keeps_no_graphs_is_not_asked_to():
    found = receipt(FakeCuda(), Library())
    assert (found.operations, found.kernels) == (None, None)


def test_nothing_is_counted_without_a_library_or_of_a_torch_that_shows_no_nodes():
    assert count_nodes(Graph(), None) == NodeCount(why=NO_COUNTER)
    assert count_nodes(object(), DriverLibrary(Library())) == NodeCount(why=NOT_KEPT)


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
