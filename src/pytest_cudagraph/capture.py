"""The capture stage: one graph for each batch size, the largest first. The model is left unchanged."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from pytest_cudagraph import inputs
from pytest_cudagraph.errors import CaptureRefusal
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.inputs.example import opaque_arguments
from pytest_cudagraph.protocols import Backend, CapturedGraph, GraphPool, Model
from pytest_cudagraph.state import NO_CONSTANTS, Constants, SizeStates, Undo

__all__ = ["Captures", "capture_after_first_call", "capture_batches"]

Executions = Callable[[int], "int | None"]
"""How often the compiled code of a batch size has run so far. None if nothing is compiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captures:
    """The captured graphs, and the refusal that ended the captures. The graphs belong to the pool."""

    graphs: Mapping[int, CapturedGraph]
    """In the order of capture: the largest batch first."""
    refused: CaptureRefusal | None = None
    refused_batch: int | None = None
    addresses: Mapping[str, int] = field(default_factory=dict)
    """The address of each tensor of the state, by name. Replays read these addresses."""
    kept: tuple[torch.Tensor, ...] = ()
    """State that was made during capture and removed from the model. Graphs may read its address."""
    size_states: SizeStates | None = None
    """The state from which each graph was captured, if it depends on the batch size."""


def nothing_compiled(batch_size: int) -> None:
    """The :data:`Executions` of a model that is not compiled."""


def capture_batches(
    call_for: Callable[[int], Model],
    examples: Mapping[int, Example],
    pool: GraphPool,
    *,
    model: Model,
    backend: Backend,
    executions: Executions = nothing_compiled,
    constants: Constants = NO_CONSTANTS,
    progress: Callable[[str], None] | None = None,
) -> Captures:
    """Capture a graph of ``call_for(batch size)`` for each example. The first refusal ends this.

    The largest batch comes first, so that the smaller ones fit into its memory in the pool. Where a first call at a
    size makes a cache for it, the graph of that size is captured after such a call. The state of ``model`` and the
    random generators are restored bit by bit after every capture, refused or not. ``constants`` must not change, and
    are not copied. Raises :class:`~pytest_cudagraph.errors.CudagraphError` naming state that cannot be restored, and
    :class:`~pytest_cudagraph.errors.InputError` for inputs that no graph takes.
    """
    undo = Undo(model, backend, extras=opaque_arguments(examples.values()), constants=constants)
    graphs: dict[int, CapturedGraph] = {}
    refusal: dict[str, Any] = {}
    for batch_size in sorted(examples, reverse=True):
        if progress is not None:
            progress(f"capture batch {batch_size}")
        example, record = examples[batch_size], functools.partial(pool.capture, rewind=undo.rewind)
        capture = functools.partial(_capture_one, call_for, example, record, batch_size, executions)
        try:
            graphs[batch_size] = capture_after_first_call(capture, undo, model, example, backend)
        except CaptureRefusal as error:
            refusal = {"refused": error, "refused_batch": batch_size}
            break
    undo.assert_unchanged()
    return Captures(
        graphs=graphs,
        addresses=undo.addresses,
        kept=undo.kept,
        size_states=undo.size_states or None,
        **refusal,
    )


def capture_after_first_call(
    capture: Callable[[], CapturedGraph], undo: Undo, model: Model, example: Example, backend: Backend
) -> CapturedGraph:
    """Capture, and if that makes tensors of the model anew, capture again after a first call that makes them."""
    with undo.undone():
        graph = capture()
        is_made = undo.size_states.is_made()
    if not is_made:  # so that other models are not called once more
        return graph

    def call() -> None:
        copied = inputs.clone(example)
        with backend.running():
            model(*copied.args, **copied.kwargs)

    with undo.undone():
        if not undo.size_states.learn(graph.receipt.batch_size, call):
            return graph
        graph.close()
        return capture()


def _capture_one(
    call_for: Callable[[int], Model],
    example: Example,
    capture: Callable[..., CapturedGraph],
    batch_size: int,
    executions: Executions,
) -> CapturedGraph:
    """Capture one graph, and refuse it if it is empty or does not run the compiled code."""
    call = call_for(batch_size)
    executed = executions(batch_size)
    graph = capture(call, example.args, example.kwargs, batch_size=batch_size)
    if executed is not None and executed >= (executions(batch_size) or 0):
        graph.close()
        raise CaptureRefusal(
            "the compiled code did not run during warm-up and capture: the call went to eager code instead",
            fix="TORCH_LOGS=graph_breaks,recompiles shows why the compiled code did not run",
        )
    if graph.receipt.kernels == 0:
        graph.close()
        raise CaptureRefusal(
            "the graph is empty: the call launches nothing on the device",
            fix="give the fixture a callable that computes on its inputs with torch",
        )
    return graph
