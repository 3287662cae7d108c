"""The nodes of a graph, asked of NVIDIA's driver by its C interface: nothing but ``libcuda.so.1`` is needed."""

from __future__ import annotations

import ctypes
from typing import Any

from pytest_cudagraph.backends.cuda.nodes import CHILD, KERNEL, MEMCPY, MEMSET, OTHER

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
