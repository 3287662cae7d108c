"""Nothing serves a call before it has given eager's answers: the check stage, at the door of every capture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from pytest_cudagraph.check import check_replays
from pytest_cudagraph.errors import CaptureRefusal, InputError, first_line
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.inputs.example import opaque_arguments
from pytest_cudagraph.protocols import Backend, CapturedGraph, GraphPool, Model
from pytest_cudagraph.state import Undo
from pytest_cudagraph.values import Disagreement, Receipt

_SEED = 0
_REFUSALS = (CaptureRefusal, InputError, torch.OutOfMemoryError)
"""What the graph runner takes as: this batch size runs eager."""


def why_unlike_eager(graph: CapturedGraph, call: Model, model: Model, example: Example, backend: Backend) -> str:
    """The first difference between ``graph``, which runs ``call``, and ``model``, on inputs not seen before; or empty.

    Raises what :func:`~pytest_cudagraph.check.check_replays` raises.
    """
    size = graph.receipt.batch_size
    found = check_replays(
        {size: graph},
        lambda _: model,
        {size: example},
        model=model,
        backend=backend,
        seed=_SEED,
        captured_for=lambda _: call,
    )[size]
    if not isinstance(found, Disagreement):
        return ""
    return "; ".join((f"{found.where} differs from eager: {found.message}", *found.evidence))


class CompiledArm:
    """Compiled code in the place of a graph, so that the same check judges it."""

    def __init__(self, call: Model, size: int) -> None:
        self._call = call
        self.replays = 0
        self.receipt = Receipt(batch_size=size, operations=None, kernels=None, opaque_regions=1)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run once."""
        output = self._call(*args, **kwargs)
        self.replays += 1
        return output

    def replay(self) -> Any:
        """Never asked for: compiled code has no inputs of its own."""
        raise NotImplementedError

    def poison(self) -> None:
        """Nothing to spoil: each run makes its outputs anew."""

    def close(self) -> None:
        """Nothing to release."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenModel:
    """What is captured: a model, and what runs in its place at a batch size. ``proven`` hears of each proof.

    A proof writes to the model's weights, and puts them back.
    """

    model: Model
    call_for: Callable[[int], Model]
    proven: Callable[[], None]


class ProvingBackend:
    """A backend whose pools refuse a graph that does not give eager's answers."""

    def __init__(self, backend: Backend, subject: ProvenModel) -> None:
        self._backend, self._subject = backend, subject
        self.kind, self.device = backend.kind, backend.device
        # As attributes, so that a call through this backend costs what a call of the other one costs.
        self.synchronize, self.order_after, self.running = backend.synchronize, backend.order_after, backend.running
        self.region, self.event_timer = backend.region, backend.event_timer
        self.rng_state, self.set_rng_state = backend.rng_state, backend.set_rng_state

    def pool(self) -> GraphPool:
        """The graphs of one model."""
        return ProvingPool(self._backend, self._subject)


class ProvingPool:
    """See :class:`~pytest_cudagraph.protocols.GraphPool`."""

    def __init__(self, backend: Backend, subject: ProvenModel) -> None:
        self._backend, self._subject = backend, subject
        self._pool = backend.pool()
        self._kept: dict[int, tuple[torch.Tensor, ...]] = {}

    def capture(
        self, model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, batch_size: int
    ) -> CapturedGraph:
        """Capture what stands in for the model at this batch size, and prove it.

        Raises :class:`~pytest_cudagraph.errors.CaptureRefusal` also for what the model raises here: it has run on the
        example's own batch size, and eager remains for this one.
        """
        try:
            return self._capture(Example(args=args, kwargs=dict(kwargs)), batch_size)
        except _REFUSALS:
            raise
        except Exception as error:
            # Whatever model, compiled code or check raise: without a graph, the caller gets what eager gives.
            raise CaptureRefusal(first_line(error)) from error

    def close(self) -> None:
        """Release all graphs and what they read."""
        try:
            self._pool.close()
        finally:
            self._kept.clear()

    def __enter__(self) -> ProvingPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _capture(self, example: Example, size: int) -> CapturedGraph:
        call = self._subject.call_for(size)
        graph = self._captured(call, example, size)
        try:
            why = why_unlike_eager(graph, call, self._subject.model, example, self._backend)
        except BaseException:
            with suppress(RuntimeError):  # a device that has failed; the first error is the one to tell
                graph.close()
            raise
        finally:
            self._subject.proven()
        if why:
            graph.close()
            raise CaptureRefusal(why)
        return graph

    def _captured(self, call: Model, example: Example, size: int) -> CapturedGraph:
        """The graph, and the model as it was: the proof must start where a call would."""
        undo = Undo(self._subject.model, self._backend, extras=opaque_arguments([example]))
        with undo.undone():
            graph = self._pool.capture(call, example.args, example.kwargs, batch_size=size)
        self._kept[size] = undo.kept
        return graph
