"""One graph per batch size, the largest first, and not a trace of it left in the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from pytest_cudagraph.errors import CaptureRefusal
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.inputs.example import opaque_arguments
from pytest_cudagraph.protocols import Backend, CapturedGraph, GraphPool, Model
from pytest_cudagraph.state import Undo

__all__ = ["Captures", "capture_batches"]

Executions = Callable[[int], "int | None"]
"""How often the compiled code of a batch size has run so far; None where nothing is compiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captures:
    """The graphs there are, and why there is no more of them. They belong to the pool and end with it."""

    graphs: Mapping[int, CapturedGraph]
    """In the order of capture: the largest batch first."""
    refused: CaptureRefusal | None = None
    refused_batch: int | None = None
    addresses: Mapping[str, int] = field(default_factory=dict)
    """Where each tensor of the state lies, by name: a replay reads it there, whatever the model holds later."""
    kept: tuple[torch.Tensor, ...] = ()
    """State that the model made while it was captured and no longer holds: the graphs may read it by address."""


def nothing_compiled(batch_size: int) -> None:
    """The :data:`Executions` of a model that is captured as it is."""


def capture_batches(
    call_for: Callable[[int], Model],
    examples: Mapping[int, Example],
    pool: GraphPool,
    *,
    model: Model,
    backend: Backend,
    executions: Executions = nothing_compiled,
    progress: Callable[[str], None] | None = None,
) -> Captures:
    """Capture a graph of ``call_for(batch size)`` for each example; the first refusal ends it.

    The largest batch comes first, so that the smaller ones fit into the memory it leaves in the pool. State and
    random generators are brought back after every capture, refused or not: warm-up and capture leave them equal to
    the last bit. ``model`` owns the state. Raises :class:`~pytest_cudagraph.errors.CudagraphError` naming what
    cannot be brought back, and :class:`~pytest_cudagraph.errors.InputError` for inputs that no graph takes.
    """
    undo = Undo(model, backend, extras=opaque_arguments(examples.values()))
    graphs: dict[int, CapturedGraph] = {}
    refusal: tuple[CaptureRefusal, int] | None = None
    for batch_size in sorted(examples, reverse=True):
        if progress is not None:
            progress(f"capture batch {batch_size}")
        try:
            with undo.undone():
                graphs[batch_size] = _capture_one(call_for, examples[batch_size], pool, batch_size, executions)
        except CaptureRefusal as error:
            refusal = error, batch_size
            break
    undo.assert_unchanged()
    return Captures(
        graphs=graphs,
        refused=refusal[0] if refusal else None,
        refused_batch=refusal[1] if refusal else None,
        addresses=undo.addresses,
        kept=undo.kept,
    )


def _capture_one(
    call_for: Callable[[int], Model], example: Example, pool: GraphPool, batch_size: int, executions: Executions
) -> CapturedGraph:
    """One graph, and the proof that there is something in it."""
    call = call_for(batch_size)
    executed = executions(batch_size)
    graph = pool.capture(call, example.args, example.kwargs, batch_size=batch_size)
    if executed is not None and executed >= (executions(batch_size) or 0):
        graph.close()
        raise CaptureRefusal(
            "the compiled code did not run during warm-up and capture: the call went to eager code instead",
            fix="TORCH_LOGS=graph_breaks,recompiles shows why the compiled code was left",
        )
    if graph.receipt.kernels == 0:
        graph.close()
        raise CaptureRefusal(
            "the graph is empty: the call launches nothing on the device",
            fix="give the fixture a callable that computes on its inputs with torch",
        )
    return graph
