"""The ways to run one model that are timed against each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from benchmarks.models.definitions import Subject

from pytest_cudagraph.capture import capture_batches
from pytest_cudagraph.compile import compile_model
from pytest_cudagraph.compile.time_limit import Deadline, stopped_at
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.protocols import Backend, CapturedGraph
from pytest_cudagraph.state import Snapshot

Call = Callable[[], Any]

LIGHT = ("eager", "replay", "graphed-callables")
ALL = ("eager", "replay", "inductor-replay", "aot-replay", "graphed-callables", "reduce-overhead")
"""In the order they are made: what may leave a half-ended capture behind comes last."""

CUDA_ONLY = ("graphed-callables", "reduce-overhead")
_SETTLING_CALLS = 4
"""CUDA graph trees warm up, record, and replay from the third call on."""


class NotAvailable(Exception):
    """An arm that this device does not have; the message is the reason that is written down."""


@dataclass(slots=True, kw_only=True)
class Workplace:
    """One model at one batch size, and what its arms share. Leaving :meth:`opened` releases everything."""

    backend: Backend
    subject: Subject
    batch_size: int
    cache_folder: Path
    compile_limit_s: float
    resources: ExitStack
    before: Snapshot
    graphs: dict[str, CapturedGraph] = field(default_factory=dict)
    compile_ns: dict[str, int] = field(default_factory=dict)

    @classmethod
    @contextmanager
    def opened(
        cls, backend: Backend, subject: Subject, batch_size: int, *, cache_folder: Path, compile_limit_s: float
    ) -> Iterator[Workplace]:
        with ExitStack() as resources:
            yield cls(
                backend=backend,
                subject=subject,
                batch_size=batch_size,
                cache_folder=cache_folder,
                compile_limit_s=compile_limit_s,
                resources=resources,
                before=Snapshot.take(subject.model),
            )

    @property
    def example(self) -> Example:
        return Example(args=self.subject.args, kwargs={})

    def rewinder(self) -> Callable[[], None] | None:
        """What brings back the state that a call moves on, found by one call; None for a model that keeps none."""
        self.subject.model(*self.subject.args)
        written = self.before.changes().written
        return self.before.rewinder(written) if written else None


def make_arm(name: str, at: Workplace) -> Call:
    """One arm, ready to be called; state is afterwards as before. Raises whatever stands in its way."""
    if at.backend.kind != "cuda" and name in CUDA_ONLY:
        raise NotAvailable(f"not available on {at.backend.kind}")
    try:
        return _ARMS[name](at)
    finally:
        at.before.restore()


def _eager(at: Workplace) -> Call:
    model, args = at.subject.model, at.subject.args
    return lambda: model(*args)


def _replay(at: Workplace) -> Call:
    return _captured("replay", at, lambda _: at.subject.model, lambda _: None)


def _captured(
    name: str, at: Workplace, call_for: Callable[[int], Any], executions: Callable[[int], int | None]
) -> Call:
    pool = at.resources.enter_context(at.backend.pool())
    captures = capture_batches(
        call_for,
        {at.batch_size: at.example},
        pool,
        model=at.subject.model,
        backend=at.backend,
        executions=executions,
    )
    if captures.refused is not None:
        raise captures.refused
    graph, args = captures.graphs[at.batch_size], at.subject.args
    at.graphs[name] = graph
    at.resources.callback(lambda kept: None, captures)  # graphs read state by address that only this keeps alive
    return lambda: graph(*args)


def _graphed_callables(at: Workplace) -> Call:
    model, args = at.subject.model, at.subject.args

    def function(*tensors: torch.Tensor) -> Any:
        return model(*tensors)

    # Given the very tensors of the timed calls it would skip the copy that a server cannot skip.
    graphed: Any = torch.cuda.make_graphed_callables(function, tuple(each.clone() for each in args))
    return lambda: graphed(*args)


def _reduce_overhead(at: Workplace) -> Call:
    model, args = at.subject.model, at.subject.args

    def function(*tensors: torch.Tensor) -> Any:
        return model(*tensors)

    compiled: Any = torch.compile(function, mode="reduce-overhead", dynamic=False)
    with stopped_at(Deadline(at.compile_limit_s), "reduce-overhead", at.batch_size):
        for _ in range(_SETTLING_CALLS):
            compiled(*args)
            at.before.restore()
    return lambda: compiled(*args)


def _compiled(name: str, mode: Any) -> Callable[[Workplace], Call]:
    def make(at: Workplace) -> Call:
        compiled = at.resources.enter_context(
            compile_model(
                at.subject.model,
                {at.batch_size: at.example},
                mode,
                at.backend,
                cache_dir=at.cache_folder,
                time_limit_s=at.compile_limit_s,
            )
        )
        at.compile_ns[name] = compiled.compile_ns[at.batch_size]
        at.before.restore()
        return _captured(name, at, compiled.call_for, compiled.executions)

    return make


_ARMS: dict[str, Callable[[Workplace], Call]] = {
    "eager": _eager,
    "replay": _replay,
    "graphed-callables": _graphed_callables,
    "reduce-overhead": _reduce_overhead,
    "inductor-replay": _compiled("inductor-replay", "inductor"),
    "aot-replay": _compiled("aot-replay", "aot"),
}
