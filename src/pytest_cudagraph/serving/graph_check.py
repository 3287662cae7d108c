"""Check compiled code and every captured graph against eager, before they serve a call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from pytest_cudagraph.capture import capture_after_first_call
from pytest_cudagraph.check import check_replays
from pytest_cudagraph.errors import CaptureRefusal, first_line
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.inputs.example import opaque_arguments
from pytest_cudagraph.protocols import Backend, CapturedGraph, GraphPool, Model
from pytest_cudagraph.serving.graph_set import REFUSALS
from pytest_cudagraph.state import SizeStates, Undo
from pytest_cudagraph.values import Disagreement, Receipt

_SEED = 0


def difference_from_eager(
    graph: CapturedGraph,
    call: Model,
    model: Model,
    example: Example,
    backend: Backend,
    size_states: SizeStates | None = None,
) -> str:
    """The first difference between ``graph``, which runs ``call``, and ``model``, on new inputs; empty if they agree.

    ``size_states``: where the graph was captured after a first call at its size. Raises what
    :func:`~pytest_cudagraph.check.check_replays` raises.
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
        size_states=size_states,
    )[size]
    if not isinstance(found, Disagreement):
        return ""
    return "; ".join((f"{found.where} differs from eager: {found.message}", *found.evidence))


class CompiledAsGraph:
    """Compiled code with the interface of a graph, so that the same check applies to both."""

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
        """Never called: compiled code has no static inputs."""
        raise NotImplementedError

    def replay_leaves(self, leaves: Sequence[Any]) -> Any:
        """Never called: see :meth:`replay`."""
        raise NotImplementedError

    def poison(self) -> None:
        """Does nothing: each run creates its outputs."""

    def close(self) -> None:
        """Does nothing: there is nothing to release."""


class CheckedBackend:
    """A backend whose pools refuse a graph that does not give eager's outputs.

    ``compiled_for`` gives the compiled code of a batch size, or None to capture the model itself. A check writes to the
    model's weights and restores them; ``on_check`` is called after each.
    """

    def __init__(
        self, backend: Backend, compiled_for: Callable[[int], Model | None], on_check: Callable[[], None]
    ) -> None:
        self._backend, self._compiled_for, self._on_check = backend, compiled_for, on_check
        self.kind, self.device = backend.kind, backend.device
        # Attributes add no cost to a call, in contrast to methods.
        self.synchronize, self.order_after, self.running = backend.synchronize, backend.order_after, backend.running
        self.region, self.event_timer = backend.region, backend.event_timer
        self.rng_state, self.set_rng_state = backend.rng_state, backend.set_rng_state

    def pool(self) -> GraphPool:
        """A pool for the graphs of one model."""
        return CheckedPool(self._backend, self._compiled_for, self._on_check)


class CheckedPool:
    """See :class:`~pytest_cudagraph.protocols.GraphPool` and :class:`CheckedBackend`."""

    def __init__(
        self, backend: Backend, compiled_for: Callable[[int], Model | None], on_check: Callable[[], None]
    ) -> None:
        self._backend, self._compiled_for, self._on_check = backend, compiled_for, on_check
        self._pool = backend.pool()
        self._kept: dict[int, tuple[torch.Tensor, ...]] = {}

    def capture(
        self,
        model: Model,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        batch_size: int,
        rewind: Callable[[], None] = lambda: None,
    ) -> CapturedGraph:
        """Capture the model, or its compiled code of this batch size, and check the graph.

        Raises :class:`~pytest_cudagraph.errors.CaptureRefusal`, also for any other exception of capture or check. Eager
        can then serve this batch size.
        """
        try:
            return self._capture(model, Example(args=args, kwargs=dict(kwargs)), batch_size, rewind)
        except REFUSALS:
            raise
        except Exception as error:
            raise CaptureRefusal(first_line(error)) from error

    def close(self) -> None:
        """Release all graphs and what they read."""
        try:
            self._pool.close()
        finally:
            self._kept.clear()

    def __enter__(self) -> CheckedPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _capture(self, model: Model, example: Example, size: int, rewind: Callable[[], None]) -> CapturedGraph:
        call = self._compiled_for(size) or model
        # The check must start from the state that a call would find.
        undo = Undo(model, self._backend, extras=opaque_arguments([example]))
        capture = functools.partial(
            self._pool.capture, call, example.args, example.kwargs, batch_size=size, rewind=rewind
        )
        graph = capture_after_first_call(capture, undo, model, example, self._backend)
        self._kept[size] = undo.kept
        try:
            difference = difference_from_eager(graph, call, model, example, self._backend, undo.size_states)
        except BaseException:
            with suppress(RuntimeError):  # a failed device: raise the first error
                graph.close()
            raise
        finally:
            self._on_check()
        if difference:
            graph.close()
            raise CaptureRefusal(difference)
        return graph
