"""The graphs of one model, and their shared memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pytest_cudagraph.backends.buffers import (
    BufferedGraph,
    StaticInputs,
    argument_names,
    check_output,
    describe,
    poison,
)
from pytest_cudagraph.backends.capture_mode import capturing, uncached_autocast
from pytest_cudagraph.backends.cuda.gpu import Gpu, warn_of_other_graphs
from pytest_cudagraph.backends.cuda.nodes import DriverLibrary, count_nodes
from pytest_cudagraph.backends.cuda.recording import EmptyGraph, no_graphs_inside, record
from pytest_cudagraph.backends.generators import generators_of, states_kept
from pytest_cudagraph.errors import CaptureRefusal, CudagraphError, InputError
from pytest_cudagraph.gc_pause import heap_frozen
from pytest_cudagraph.protocols import Model
from pytest_cudagraph.pytree import flatten, tensors_in
from pytest_cudagraph.values import Receipt


class CudaCapturedGraph(BufferedGraph):
    """Copies inputs in and launches, on the caller's current stream. Never waits for the device."""

    def __init__(
        self, gpu: Gpu, graph: Any, inputs: StaticInputs, output: Any, owned: Sequence[torch.Tensor], receipt: Receipt
    ) -> None:
        super().__init__(inputs, output, receipt)
        self._gpu = gpu
        self._graph = graph
        self._owned = tuple(owned)

    @property
    def is_open(self) -> bool:
        """Whether :meth:`close` has not been called."""
        return self._inputs is not None

    def replay(self) -> Any:
        """Launch once on the values that the static inputs hold. Return the same output objects every time."""
        if self._inputs is None:
            raise self._closed_error()
        if torch.is_inference_mode_enabled():
            self._graph.replay()
        else:
            # Some versions of torch write the seeds of a replay to inference tensors.
            with torch.inference_mode():
                self._graph.replay()
        self._replays += 1
        return self._output

    def poison(self) -> None:
        """Fill the outputs in the graph's own memory, in order of the current stream."""
        if self._inputs is None:
            raise self._closed_error()
        for tensor in self._owned:
            poison(tensor)

    def close(self) -> None:
        """Wait for the device, then release graph, inputs and outputs. A second call does nothing."""
        if self._inputs is None:
            return
        graph, held = self._graph, (self._inputs, self._output, self._owned)
        self._graph, self._inputs, self._output, self._owned = None, None, None, ()
        try:
            # A replay may still be running, on any stream, and read and write all this memory.
            self._gpu.synchronize()
        finally:
            del held
            graph.reset()


_WARM_UPS = 3
"""Calls before a capture, in which libraries choose algorithms and make workspaces, and compilers compile."""


class CudaGraphPool:
    """Graphs with one memory pool. See :class:`~pytest_cudagraph.protocols.GraphPool`."""

    def __init__(self, gpu: Gpu, node_source: DriverLibrary | None) -> None:
        self._gpu = gpu
        self._node_source = node_source
        self._handle: Any = None
        self._graphs: list[CudaCapturedGraph] = []
        self._is_open = True

    def capture(
        self,
        model: Model,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        batch_size: int,
        rewind: Callable[[], None] = lambda: None,
    ) -> CudaCapturedGraph:
        """Warm up three times on the capture stream, then capture one call.

        Raises :class:`~pytest_cudagraph.errors.CaptureRefusal` with CUDA's words, and
        :class:`~pytest_cudagraph.errors.InputError` for tensors on another device. An error of the model during
        warm-up comes through unchanged.
        """
        self._check_usable()
        _check_devices(args, kwargs, self._gpu.device)
        generators = tuple(generators_of(self._gpu.device, model, args, kwargs))
        with self._gpu.capture_lock, self._gpu.running(), uncached_autocast(), states_kept(generators), capturing():
            inputs = StaticInputs(args, kwargs)
            self._warm_up(model, inputs, rewind)
            inputs.copy_in(args, kwargs)  # a model may have written to its inputs
            with heap_frozen():
                graph = self._record(model, inputs, batch_size, generators)
        self._graphs.append(graph)
        return graph

    def close(self) -> None:
        """Close every graph, the last one first. A second call does nothing."""
        self._is_open = False
        failed: Exception | None = None
        while self._graphs:
            try:
                self._graphs.pop().close()
            except RuntimeError as error:
                # Report the first error. A lost device fails for every graph.
                failed = failed or error
        if failed is not None:
            raise failed

    def __enter__(self) -> CudaGraphPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _warm_up(self, model: Model, inputs: StaticInputs, rewind: Callable[[], None]) -> None:
        with self._gpu.on_capture_stream():
            for _ in range(_WARM_UPS):
                with no_graphs_inside():
                    check_output(_call(model, inputs))
                rewind()
        # An error of a warm-up kernel must show here, and not inside the capture.
        self._gpu.synchronize()

    def _record(
        self, model: Model, inputs: StaticInputs, batch_size: int, generators: tuple[torch.Generator, ...]
    ) -> CudaCapturedGraph:
        if not self._graphs:
            warn_of_other_graphs(self._gpu.cuda)
        empty = self._empty_graph(generators)
        self._gpu.cuda.empty_cache()  # so that memory freed by the warm-up does not count as the graph's
        held_before = self._held_bytes(empty.handle)
        started_ns = time.perf_counter_ns()
        try:
            output = record(self._gpu, empty, lambda: _call(model, inputs))
        except BaseException:
            self._handle = None  # torch may count it as being captured into, and refuse it
            raise
        capture_ns = time.perf_counter_ns() - started_ns
        counted = count_nodes(empty.graph, self._node_source)
        receipt = Receipt(
            batch_size=batch_size,
            operations=counted.nodes,
            kernels=counted.kernels,
            kernel_names=counted.kernel_names,
            not_counted=counted.why,
            capture_ns=capture_ns,
            memory_bytes=_growth(held_before, self._held_bytes(empty.handle)),
        )
        owned = own_outputs(self._gpu, empty.handle, output)
        return CudaCapturedGraph(self._gpu, empty.graph, inputs, output, owned, receipt)

    def _empty_graph(self, generators: tuple[torch.Generator, ...]) -> EmptyGraph:
        """An empty graph, with a new handle if no open graph holds the old one.

        Torch frees a pool with its last graph, and fails an assertion (``use_count > 0``) if its handle is used again.
        """
        cuda, is_shared = self._gpu.cuda, self._handle is not None and any(graph.is_open for graph in self._graphs)
        if not is_shared:
            self._handle = cuda.graph_pool_handle()
        # Torch shows only the nodes of a kept graph, since 2.8.
        keeps = self._node_source is not None and hasattr(cuda.CUDAGraph, "raw_cuda_graph")
        graph = self._gpu.new_graph(keep_graph=True) if keeps else self._gpu.new_graph()
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


def own_outputs(gpu: Gpu, handle: Any, output: Any) -> list[torch.Tensor]:
    """The output tensors whose memory belongs to the pool ``handle``, each memory range once.

    Inputs, parameters and other tensors from outside are left out, since they must never be poisoned. The allocator
    knows where each tensor lies. An allocator that does not tell (``cudaMallocAsync``, a user's own) gives no tensors.
    """
    ranges = _ranges(_segments(gpu), handle)
    seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
    owned = []
    for tensor in tensors_in(output):
        if not _is_strided(tensor):
            continue
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and key not in seen and any(low <= key[0] < high for low, high in ranges):
            seen.add(key)
            owned.append(tensor)
    return owned


def _is_strided(tensor: torch.Tensor) -> bool:
    # A sparse or nested tensor has no single memory range, a wrapper subclass none at all.
    return tensor.layout is torch.strided and not tensor.is_nested and not is_traceable_wrapper_subclass(tensor)


def pool_bytes(gpu: Gpu, handle: Any) -> int | None:
    """The bytes that the pool ``handle`` holds, or None where the allocator does not tell."""
    segments = _segments(gpu)
    return None if segments is None else sum(high - low for low, high in _ranges(segments, handle))


def reserved_bytes(gpu: Gpu) -> int | None:
    """The bytes that the allocator holds, or None where it keeps no statistics."""
    try:
        return int(gpu.cuda.memory_reserved(gpu.index))
    except RuntimeError:
        return None


def _segments(gpu: Gpu) -> Sequence[Mapping[str, Any]] | None:
    """The memory of torch's own allocator, or None for another allocator, which raises here."""
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
