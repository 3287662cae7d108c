"""The graphs of one model and their shared memory: see :class:`~pytest_cudagraph.protocols.GraphPool`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from pytest_cudagraph.backends.autocast import uncached_autocast
from pytest_cudagraph.backends.capturing import capturing
from pytest_cudagraph.backends.cuda.generators import generators_of, states_kept
from pytest_cudagraph.backends.cuda.gpu import Gpu
from pytest_cudagraph.backends.cuda.graph import CudaCapturedGraph
from pytest_cudagraph.backends.cuda.nested import no_graphs_inside
from pytest_cudagraph.backends.cuda.nodes import NodeSource, count_nodes
from pytest_cudagraph.backends.cuda.ownership import own_outputs, pool_bytes, reserved_bytes
from pytest_cudagraph.backends.cuda.quiet import quiet_collector
from pytest_cudagraph.backends.cuda.recording import Blank, record
from pytest_cudagraph.backends.outputs import check_output
from pytest_cudagraph.backends.static_inputs import StaticInputs, argument_names, describe
from pytest_cudagraph.errors import CaptureRefusal, CudagraphError, InputError
from pytest_cudagraph.leaves import flatten
from pytest_cudagraph.protocols import Model
from pytest_cudagraph.values import Receipt

_WARM_UPS = 3
"""Calls before a capture: libraries choose algorithms, make handles and workspaces, compilers compile."""


class CudaGraphPool:
    """Captures into one memory pool; leaving it closes every graph."""

    def __init__(self, gpu: Gpu, node_source: NodeSource | None) -> None:
        self._gpu = gpu
        self._node_source = node_source
        self._handle: Any = None
        self._graphs: list[CudaCapturedGraph] = []
        self._is_open = True

    def capture(
        self, model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, batch_size: int
    ) -> CudaCapturedGraph:
        """Warm up three times on the capture stream, then capture one call.

        Raises :class:`~pytest_cudagraph.errors.CaptureRefusal` with CUDA's words, and
        :class:`~pytest_cudagraph.errors.InputError` for tensors on another device. An error of the model during
        warm-up comes through as it is.
        """
        self._check_usable()
        _check_devices(args, kwargs, self._gpu.device)
        generators = tuple(generators_of(self._gpu.device, model, args, kwargs))
        with self._gpu.captures, self._gpu.running(), uncached_autocast(), states_kept(generators), capturing():
            inputs = StaticInputs(args, kwargs)
            self._warm_up(model, inputs)
            inputs.copy_in(args, kwargs)  # a model may have written to its inputs
            with quiet_collector():
                graph = self._record(model, inputs, batch_size, generators)
        self._graphs.append(graph)
        return graph

    def close(self) -> None:
        """Close every graph, the last one first; a second call does nothing."""
        self._is_open = False
        failed: Exception | None = None
        while self._graphs:
            try:
                self._graphs.pop().close()
            except RuntimeError as error:
                # The first error is the story; a device that is lost fails for every graph.
                failed = failed or error
        if failed is not None:
            raise failed

    def __enter__(self) -> CudaGraphPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _warm_up(self, model: Model, inputs: StaticInputs) -> None:
        with self._gpu.on_capture_stream():
            for _ in range(_WARM_UPS):
                with no_graphs_inside():
                    check_output(_call(model, inputs))
        # An error of a warm-up kernel must show here, not as a riddle inside the capture.
        self._gpu.synchronize()

    def _record(
        self, model: Model, inputs: StaticInputs, batch_size: int, generators: tuple[torch.Generator, ...]
    ) -> CudaCapturedGraph:
        blank = self._blank(generators)
        self._gpu.cuda.empty_cache()  # else memory freed by the warm-up would be taken for the graph's
        held_before = self._held_bytes(blank.handle)
        started_ns = time.perf_counter_ns()
        try:
            outputs = record(self._gpu, blank, lambda: _call(model, inputs))
        except BaseException:
            self._handle = None  # torch may take it for one still being captured into, and refuse it
            raise
        capture_ns = time.perf_counter_ns() - started_ns
        counted = count_nodes(blank.graph, self._node_source)
        receipt = Receipt(
            batch_size=batch_size,
            operations=counted.nodes,
            kernels=counted.kernels,
            kernel_names=counted.kernel_names,
            not_counted=counted.why,
            capture_ns=capture_ns,
            memory_bytes=_growth(held_before, self._held_bytes(blank.handle)),
        )
        owned = own_outputs(self._gpu, blank.handle, outputs)
        return CudaCapturedGraph(self._gpu, blank.graph, inputs, outputs, owned, receipt)

    def _blank(self, generators: tuple[torch.Generator, ...]) -> Blank:
        """An empty graph for the pool's handle while a graph holds it, for a new one otherwise.

        Torch frees a pool with its last graph and asserts (``use_count > 0``) when the handle is used again.
        """
        cuda, is_shared = self._gpu.cuda, self._handle is not None and any(graph.is_open for graph in self._graphs)
        if not is_shared:
            self._handle = cuda.graph_pool_handle()
        # Only a kept graph shows its nodes; torch keeps graphs since 2.8.
        keeps = self._node_source is not None and hasattr(cuda.CUDAGraph, "raw_cuda_graph")
        graph = cuda.CUDAGraph(keep_graph=True) if keeps else cuda.CUDAGraph()
        return Blank(graph=graph, handle=self._handle, is_shared=is_shared, keeps=keeps, generators=generators)

    def _held_bytes(self, handle: Any) -> int | None:
        held = pool_bytes(self._gpu, handle)
        return reserved_bytes(self._gpu) if held is None else held

    def _check_usable(self) -> None:
        if not self._is_open:
            raise CudagraphError("this graph pool is closed; open another one")
        if self._gpu.broken:
            raise CaptureRefusal(
                "an earlier capture was refused and left this process unable to capture "
                f"({self._gpu.broken}); run this test in a process of its own",
                hazard="unknown-op",
            )


def _growth(before_bytes: int | None, after_bytes: int | None) -> int | None:
    return None if before_bytes is None or after_bytes is None else max(0, after_bytes - before_bytes)


def _call(model: Model, inputs: StaticInputs) -> Any:
    args, kwargs = inputs.arguments()
    return model(*args, **kwargs)


def _check_devices(args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str) -> None:
    leaves, structure = flatten((args, dict(kwargs)))
    for name, leaf in zip(argument_names(structure), leaves, strict=True):
        if isinstance(leaf, torch.Tensor) and str(leaf.device) != device:
            raise InputError(
                f"{name}: a graph on {device} takes tensors on {device}; this one is {describe(leaf)}\n"
                f"move it with .to({device!r}) before the call, or pass a plain number"
            )
