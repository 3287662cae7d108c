"""How many nodes and kernels a captured graph holds.

Torch shows a graph's nodes only of one made with ``keep_graph``, from 2.8 on. They are then asked of NVIDIA's Python
bindings (a dependency of torch's CUDA wheels of late), else of the driver's library itself. Elsewhere nothing is
counted, and the receipt says why.
"""

from __future__ import annotations

import ctypes
import importlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

_QUALIFIED = re.compile(r"_ZN?K?")
_TOKEN = re.compile(r"L[a-z]n?\d+E|[ST]\d*_|(?P<length>\d+)")
"""A literal, a back reference or a length: the three places of a mangled name where digits stand."""

NO_COUNTER = "neither NVIDIA's Python bindings (cuda.bindings) nor the driver's library (libcuda.so.1) can be loaded"
NOT_KEPT = "this torch shows no nodes of a graph; 2.8 and later do"
NOT_TOLD = "the driver does not list the nodes of this graph"

KERNEL, MEMCPY, MEMSET, CHILD = range(4)
OTHER = -1
"""What a node is, whichever of the two is asked: :class:`NodeSource`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCount:
    """All nodes of a graph, and by name those that make the device work: kernels, ``memcpy``, ``memset``.

    Copies and fills count as kernels do, because torch launches either for the same line of a model. Where ``nodes``
    is None, nothing was counted, and ``why`` says for what reason.
    """

    nodes: int | None = None
    kernel_names: Mapping[str, int] = field(default_factory=dict)
    why: str = ""

    @property
    def kernels(self) -> int | None:
        return None if self.nodes is None else sum(self.kernel_names.values())


class NodeSource(Protocol):
    """What can be asked of a ``cudaGraph_t``. A question that the driver does not answer raises RuntimeError."""

    def nodes(self, graph: Any) -> list[Any]: ...

    def kind(self, node: Any) -> int: ...

    def kernel_name(self, node: Any) -> str:
        """As the compiler mangled it; empty where it is not told."""
        ...

    def child(self, node: Any) -> Any:
        """The graph inside of a node of kind ``CHILD``."""
        ...


class Bindings:
    """``cuda.bindings.runtime`` and ``cuda.bindings.driver``, as far as they are needed here."""

    def __init__(self, runtime: Any, driver: Any) -> None:
        self._runtime, self._driver = runtime, driver

    def nodes(self, graph: Any) -> list[Any]:
        """The nodes of one graph, those inside of its child graphs left out."""
        error, _, total = self._runtime.cudaGraphGetNodes(graph, numNodes=0)
        if not int(error) and total:
            error, nodes, total = self._runtime.cudaGraphGetNodes(graph, numNodes=total)
        if int(error):
            raise RuntimeError(f"cudaGraphGetNodes: {error}")
        return list(nodes[:total]) if total else []

    def kind(self, node: Any) -> int:
        """KERNEL, MEMCPY, MEMSET, CHILD, or OTHER for events, host callbacks and empty nodes."""
        error, kind = self._runtime.cudaGraphNodeGetType(node)
        kinds = self._runtime.cudaGraphNodeType
        names = ("Kernel", "Memcpy", "Memset", "Graph")
        known = (getattr(kinds, f"cudaGraphNodeType{name}", None) for name in names)
        return OTHER if int(error) else next((at for at, each in enumerate(known) if each == kind), OTHER)

    def kernel_name(self, node: Any) -> str:
        """The name of a kernel node's function, or of its kernel where no function is set."""
        driver = self._driver
        error, params = driver.cuGraphKernelNodeGetParams(driver.CUgraphNode(init_value=int(node)))
        if int(error):
            return ""
        if int(params.func):
            error, name = driver.cuFuncGetName(driver.CUfunction(init_value=int(params.func)))
        elif hasattr(driver, "cuKernelGetName") and int(getattr(params, "kern", 0)):
            error, name = driver.cuKernelGetName(params.kern)
        else:
            return ""
        if int(error):
            return ""
        return name.decode() if isinstance(name, bytes) else str(name)

    def child(self, node: Any) -> Any:
        """The graph inside of a child graph node."""
        error, graph = self._runtime.cudaGraphChildGraphNodeGetGraph(node)
        if int(error):
            raise RuntimeError(f"cudaGraphChildGraphNodeGetGraph: {error}")
        return graph


def load_bindings() -> Bindings | None:
    """NVIDIA's bindings, or None where they are not installed or do not load."""
    try:
        runtime, driver = (importlib.import_module(f"cuda.bindings.{name}") for name in ("runtime", "driver"))
    except (ImportError, RuntimeError):
        # They raise RuntimeError for a driver library that is missing or too old.
        return None
    return Bindings(runtime, driver)


def count_nodes(graph: Any, source: NodeSource | None) -> NodeCount:
    """The nodes of a ``torch.cuda.CUDAGraph``; without a count, and with the reason, where they cannot be seen."""
    if source is None:
        return NodeCount(why=NO_COUNTER)
    if not hasattr(graph, "raw_cuda_graph"):
        return NodeCount(why=NOT_KEPT)
    try:
        names = list(_work_names(source, graph.raw_cuda_graph()))
    except (RuntimeError, AttributeError, TypeError, ValueError) as error:
        # A count is worth having, never worth failing for: bindings differ between versions of CUDA.
        return NodeCount(why=f"{NOT_TOLD} ({type(error).__name__}: {error})")
    return NodeCount(nodes=len(names), kernel_names=dict(sorted(Counter(filter(None, names)).items())))


def _work_names(source: NodeSource, graph: Any) -> Iterator[str]:
    """What each node runs on the device; empty for events, host callbacks and empty nodes."""
    for node in source.nodes(graph):
        kind = source.kind(node)
        if kind == KERNEL:
            yield short_kernel_name(source.kernel_name(node)) or "kernel"
            continue
        yield {MEMCPY: "memcpy", MEMSET: "memset"}.get(kind, "")
        if kind == CHILD:
            yield from _work_names(source, source.child(node))


def short_kernel_name(name: str) -> str:
    """``vectorized_elementwise_kernel<MulFunctor>`` from a mangled C++ name; names of C and Triton stay as they are.

    The names in an Itanium-mangled symbol stand as length and text. Of the template arguments only the functor is
    kept: it is what tells an addition from a multiplication.
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


_LIBRARY = "libcuda.so.1"

# enum CUgraphNodeType_enum of cuda.h
_KINDS = {0: KERNEL, 1: MEMCPY, 2: MEMSET, 4: CHILD}


class KernelParams(ctypes.Structure):
    """``CUDA_KERNEL_NODE_PARAMS_v2`` of cuda.h, CUDA 12 and later; ``kern`` counts where ``func`` is null."""

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
    """See :class:`~pytest_cudagraph.backends.cuda.nodes.NodeSource`. Handles are plain integers."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def nodes(self, graph: int) -> list[int]:
        """The nodes of one graph, those inside of its child graphs left out."""
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
        """The name of a kernel node's function, or of its kernel where no function is set; empty if not told."""
        params, name = KernelParams(), ctypes.c_char_p()
        try:
            self._ask("cuGraphKernelNodeGetParams_v2", ctypes.c_void_p(node), ctypes.byref(params))
            if params.func:
                self._ask("cuFuncGetName", ctypes.byref(name), ctypes.c_void_p(params.func))
            elif params.kern:
                self._ask("cuKernelGetName", ctypes.byref(name), ctypes.c_void_p(params.kern))
        except (RuntimeError, AttributeError):
            # Drivers before 12.3 know no names; the kernel counts all the same.
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


def load_driver() -> DriverLibrary | None:
    """The driver of this machine, or None where there is none."""
    try:
        return DriverLibrary(ctypes.CDLL(_LIBRARY))
    except OSError:
        return None
