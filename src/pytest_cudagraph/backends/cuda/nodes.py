"""How many nodes and kernels a captured graph holds, by NVIDIA's Python bindings where they are installed.

Torch shows a graph's nodes only through ``cuda.bindings`` (a dependency of its CUDA wheels of late) and only of a
graph made with ``keep_graph``, from 2.8 on. Elsewhere nothing is counted, and the receipt says so with None.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_QUALIFIED = re.compile(r"_ZN?K?")
_TOKEN = re.compile(r"L[a-z]n?\d+E|[ST]\d*_|(?P<length>\d+)")
"""A literal, a back reference or a length: the three places of a mangled name where digits stand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCount:
    """All nodes of a graph, and by name those that make the device work: kernels, ``memcpy``, ``memset``.

    Copies and fills count as kernels do, because torch launches either for the same line of a model.
    """

    nodes: int
    kernel_names: Mapping[str, int]

    @property
    def kernels(self) -> int:
        return sum(self.kernel_names.values())


class Bindings:
    """``cuda.bindings.runtime`` and ``cuda.bindings.driver``, as far as they are needed here."""

    def __init__(self, runtime: Any, driver: Any) -> None:
        self._runtime, self._driver = runtime, driver

    def count(self, raw_graph: int) -> NodeCount | None:
        """The nodes of a ``cudaGraph_t``; None when the driver does not tell."""
        error, _, total = self._runtime.cudaGraphGetNodes(raw_graph, numNodes=0)
        if int(error) or not total:
            return None if int(error) else NodeCount(nodes=0, kernel_names={})
        error, nodes, total = self._runtime.cudaGraphGetNodes(raw_graph, numNodes=total)
        if int(error):
            return None
        names = Counter(name for node in nodes[:total] if (name := self._work_name(node)))
        return NodeCount(nodes=total, kernel_names=dict(sorted(names.items())))

    def _work_name(self, node: Any) -> str:
        """What the node runs on the device; empty for events, host callbacks and empty nodes."""
        error, kind = self._runtime.cudaGraphNodeGetType(node)
        kinds = self._runtime.cudaGraphNodeType
        if int(error):
            return ""
        if kind == kinds.cudaGraphNodeTypeKernel:
            return self._kernel_name(node)
        if kind == kinds.cudaGraphNodeTypeMemcpy:
            return "memcpy"
        return "memset" if kind == kinds.cudaGraphNodeTypeMemset else ""

    def _kernel_name(self, node: Any) -> str:
        driver = self._driver
        error, params = driver.cuGraphKernelNodeGetParams(driver.CUgraphNode(init_value=int(node)))
        if int(error) or not int(params.func):
            return "kernel"
        error, name = driver.cuFuncGetName(driver.CUfunction(init_value=int(params.func)))
        if int(error):
            return "kernel"
        return short_kernel_name(name.decode() if isinstance(name, bytes) else str(name))


def load_bindings() -> Bindings | None:
    """NVIDIA's bindings, or None where they are not installed or do not load."""
    try:
        runtime, driver = (importlib.import_module(f"cuda.bindings.{name}") for name in ("runtime", "driver"))
    except (ImportError, RuntimeError):
        # They raise RuntimeError for a driver library that is missing or too old.
        return None
    return Bindings(runtime, driver)


def count_nodes(graph: Any, bindings: Bindings | None) -> NodeCount | None:
    """The nodes of a ``torch.cuda.CUDAGraph`` made with ``keep_graph``; None where they cannot be seen."""
    if bindings is None:
        return None
    try:
        return bindings.count(graph.raw_cuda_graph())
    except (RuntimeError, AttributeError, TypeError, ValueError):
        # A count is worth having, never worth failing for: bindings differ between versions of CUDA.
        return None


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
