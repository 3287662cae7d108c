"""How many nodes and kernels a captured graph holds.

Torch 2.8 and later give access to the nodes of a graph made with ``keep_graph``. The driver's library lists them.
Elsewhere the receipt says why nothing was counted.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
NO_COUNTER = f"the driver's library ({LIBRARY}) cannot be loaded"
NOT_KEPT = "this torch does not show the nodes of a graph (2.8 and later do)"
NOT_TOLD = "the driver does not list the nodes of this graph"

KERNEL, MEMCPY, MEMSET, CHILD = range(4)
OTHER = -1
"""The kinds of nodes that are told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCount:
    """The number of nodes of a graph, and the work nodes by name: kernels, ``memcpy``, ``memset``.

    Copies and fills count as kernels, because torch may use either for the same line of a model. ``nodes`` is None
    where nothing was counted. ``why`` says why.
    """

    nodes: int | None = None
    kernel_names: Mapping[str, int] = field(default_factory=dict)
    why: str = ""

    @property
    def kernels(self) -> int | None:
        return None if self.nodes is None else sum(self.kernel_names.values())


def count_nodes(graph: Any, source: DriverLibrary | None) -> NodeCount:
    """Count the nodes of a ``torch.cuda.CUDAGraph``, or say why they cannot be counted."""
    if source is None:
        return NodeCount(why=NO_COUNTER)
    if not hasattr(graph, "raw_cuda_graph"):
        return NodeCount(why=NOT_KEPT)
    try:
        names = list(_work_names(source, graph.raw_cuda_graph()))
    except (RuntimeError, AttributeError, TypeError, ValueError) as error:
        # A missing count must not fail the capture. Libraries differ between versions of CUDA.
        return NodeCount(why=f"{NOT_TOLD} ({type(error).__name__}: {error})")
    return NodeCount(nodes=len(names), kernel_names=dict(sorted(Counter(filter(None, names)).items())))


def _work_names(source: DriverLibrary, graph: Any) -> Iterator[str]:
    """The name of the work of each node, empty for events, host callbacks and empty nodes."""
    for node in source.nodes(graph):
        kind = source.kind(node)
        if kind == KERNEL:
            yield short_kernel_name(source.kernel_name(node)) or "kernel"
            continue
        yield {MEMCPY: "memcpy", MEMSET: "memset"}.get(kind, "")
        if kind == CHILD:
            yield from _work_names(source, source.child(node))


_QUALIFIED = re.compile(r"_ZN?K?")
_TOKEN = re.compile(r"L[a-z]n?\d+E|[ST]\d*_|(?P<length>\d+)")
"""A literal, a back reference or a length: the places of a mangled name that hold digits."""


def short_kernel_name(name: str) -> str:
    """``vectorized_elementwise_kernel<MulFunctor>`` from a mangled C++ name. Names of C and Triton do not change.

    An Itanium-mangled symbol holds each name as its length and its text. Of the template arguments only the functor
    is kept: it distinguishes an addition from a multiplication.
    """
    path = _QUALIFIED.match(name)
    if path is None:
        return name
    names, end = _identifiers(name, path.end(), stop_at_arguments=True)
    functors = [found for found in _identifiers(name, end)[0] if "functor" in found.lower()]
    if not names:
        return name
    return f"{names[-1]}<{functors[-1]}>" if functors else names[-1]


def _identifiers(mangled: str, at: int, *, stop_at_arguments: bool = False) -> tuple[list[str], int]:
    found: list[str] = []
    while at < len(mangled) and not (stop_at_arguments and mangled[at] in "IEv"):
        token = _TOKEN.match(mangled, at)
        if token is None or token.group("length") is None:
            at = token.end() if token else at + 1
            continue
        end = token.end() + int(token.group("length"))
        found.append(mangled[token.end() : end])
        at = end
    return found, at


# enum CUgraphNodeType_enum of cuda.h
_KINDS = {0: KERNEL, 1: MEMCPY, 2: MEMSET, 4: CHILD}


class KernelParams(ctypes.Structure):
    """``CUDA_KERNEL_NODE_PARAMS_v2`` of cuda.h, CUDA 12 and later. ``kern`` counts where ``func`` is null."""

    _fields_ = (
        ("func", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("params", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class DriverLibrary:
    """Reads the nodes of a ``cudaGraph_t``. Handles are integers. Raises RuntimeError for an error of the driver."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def nodes(self, graph: int) -> list[int]:
        """The nodes of one graph, without those of its child graphs."""
        total = ctypes.c_size_t(0)
        self._ask("cuGraphGetNodes", ctypes.c_void_p(graph), None, ctypes.byref(total))
        found = (ctypes.c_void_p * total.value)()
        if total.value:
            self._ask("cuGraphGetNodes", ctypes.c_void_p(graph), found, ctypes.byref(total))
        return [int(node) for node in found[: total.value] if node]

    def kind(self, node: int) -> int:
        """KERNEL, MEMCPY, MEMSET, CHILD, or OTHER for events, host callbacks and empty nodes."""
        kind = ctypes.c_int(OTHER)
        self._ask("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
        return _KINDS.get(kind.value, OTHER)

    def kernel_name(self, node: int) -> str:
        """The mangled name of a kernel node's function, or of its kernel where none is set. Empty if unknown."""
        params, name = KernelParams(), ctypes.c_char_p()
        try:
            self._ask("cuGraphKernelNodeGetParams_v2", ctypes.c_void_p(node), ctypes.byref(params))
            if params.func:
                self._ask("cuFuncGetName", ctypes.byref(name), ctypes.c_void_p(params.func))
            elif params.kern:
                self._ask("cuKernelGetName", ctypes.byref(name), ctypes.c_void_p(params.kern))
        except (RuntimeError, AttributeError):
            # Drivers before 12.3 know no names. The kernel still counts.
            return ""
        return (name.value or b"").decode()

    def child(self, node: int) -> int:
        """The graph inside of a child graph node."""
        graph = ctypes.c_void_p()
        self._ask("cuGraphChildGraphNodeGetGraph", ctypes.c_void_p(node), ctypes.byref(graph))
        return int(graph.value or 0)

    def _ask(self, question: str, *arguments: Any) -> None:
        error = getattr(self._library, question)(*arguments)
        if error:
            raise RuntimeError(f"{question}: error {error} of the driver")


def load_driver(library: str | None = LIBRARY) -> DriverLibrary | None:
    """The driver's library, or None where it does not load."""
    try:
        return DriverLibrary(ctypes.CDLL(library))
    except OSError:
        return None
