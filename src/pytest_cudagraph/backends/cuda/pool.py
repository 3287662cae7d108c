"""The graphs of one model and their shared memory: see :class:`~pytest_cudagraph.protocols.GraphPool`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pytest_cudagraph.backends.buffers import StaticInputs, argument_names, check_output, describe
from pytest_cudagraph.backends.capture_mode import capturing, uncached_autocast
from pytest_cudagraph.backends.cuda.generators import generators_of, states_kept
from pytest_cudagraph.backends.cuda.gpu import Gpu, quiet_gc
from pytest_cudagraph.backends.cuda.graph import CudaCapturedGraph
from pytest_cudagraph.backends.cuda.nodes import NodeSource, count_nodes
from pytest_cudagraph.backends.cuda.recording import EmptyGraph, no_graphs_inside, record
from pytest_cudagraph.errors import CaptureRefusal, CudagraphError, InputError
from pytest_cudagraph.protocols import Model
from pytest_cudagraph.pytree import flatten, tensors_in
from pytest_cudagraph.values import Receipt


def own_outputs(gpu: Gpu, handle: Any, outputs: Any) -> list[torch.Tensor]:
    """The output tensors whose memory belongs to the pool ``handle``, each memory range once.

    An output that is an input, a parameter or any other tensor from outside does not, and must never be filled. The
    allocator is asked rather than the model, because a callable can hold tensors where nobody finds them. An
    allocator that does not tell (``cudaMallocAsync``, one of the user's own) leaves this empty.
    """
    ranges = _ranges(_segments(gpu), handle)
    seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
    owned = []
    for tensor in tensors_in(outputs):
        if not _is_strided(tensor):
            continue
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and key not in seen and any(low <= key[0] < high for low, high in ranges):
            seen.add(key)
            owned.append(tensor)
    return owned


def _is_strided(tensor: torch.Tensor) -> bool:
    # Sparse and nested tensors lie in several tensors; a wrapper subclass in none.
    return tensor.layout is torch.strided and not tensor.is_nested and not is_traceable_wrapper_subclass(tensor)


def pool_bytes(gpu: Gpu, handle: Any) -> int | None:
    """What the pool ``handle`` holds of the device; None from an allocator that does not tell."""
    segments = _segments(gpu)
    return None if segments is None else sum(high - low for low, high in _ranges(segments, handle))


def reserved_bytes(gpu: Gpu) -> int | None:
    """What the allocator holds of the device in all; None from one that keeps no statistics."""
    try:
        return int(gpu.cuda.memory_reserved(gpu.index))
    except RuntimeError:
        return None


def _segments(gpu: Gpu) -> Sequence[Mapping[str, Any]] | None:
    """The memory that torch's own allocator holds; None where another one is in its place, which raises."""
    try:
        segments: Sequence[Mapping[str, Any]] = gpu.cuda.memory_snapshot()
    except RuntimeError:
        return None
    return segments


def _ranges(segments: Sequence[Mapping[str, Any]] | None, handle: Any) -> list[tuple[int, int]]:
    return [
        (segment["address"], segment["address"] + segment["total_size"])
        for segment in segments or ()
        if tuple(segment.get("segment_pool_id", ())) == tuple(handle)
    ]


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
            with quiet_gc():
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

    def _blank(self, generators: tuple[torch.Generator, ...]) -> EmptyGraph:
        """An empty graph for the pool's handle while a graph holds it, for a new one otherwise.

        Torch frees a pool with its last graph and asserts (``use_count > 0``) when the handle is used again.
        """
        cuda, is_shared = self._gpu.cuda, self._handle is not None and any(graph.is_open for graph in self._graphs)
        if not is_shared:
            self._handle = cuda.graph_pool_handle()
        # Only a kept graph shows its nodes; torch keeps graphs since 2.8.
        keeps = self._node_source is not None and hasattr(cuda.CUDAGraph, "raw_cuda_graph")
        graph = cuda.CUDAGraph(keep_graph=True) if keeps else cuda.CUDAGraph()
        return EmptyGraph(graph=graph, handle=self._handle, is_shared=is_shared, keeps=keeps, generators=generators)

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
