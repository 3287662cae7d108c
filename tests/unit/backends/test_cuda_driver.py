"""Counting nodes by the driver's C interface, with a library written in Python that fills in what CUDA would."""

import ctypes

import pytest

from pytest_cudagraph.backends.cuda.nodes import DriverLibrary, KernelParams, count_nodes, load_driver

GRAPH, CHILD_GRAPH = 0x7F0000000010, 0x7F0000000020
NODES = {GRAPH: [1, 2, 3, 4, 5], CHILD_GRAPH: [6]}
KINDS = {1: 0, 2: 1, 3: 2, 4: 4, 5: 6, 6: 0}  # kernel, copy, fill, child graph, wait for an event, kernel
FUNCTION, KERNEL = 0x7F0000000030, 0x7F0000000040


class Library:
    """libcuda, as far as it is called; the calls in ``fails`` return an error."""

    def __init__(self, fails=()):
        self.fails = fails

    def __getattribute__(self, name):
        fails = object.__getattribute__(self, "fails")
        return (lambda *arguments: 700) if name in fails else object.__getattribute__(self, name)

    def cuGraphGetNodes(self, graph, found, total):
        nodes = NODES[graph.value]
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
        name._obj.value = b"triton_poi_fused_0"
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
