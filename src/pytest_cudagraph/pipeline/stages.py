"""Compile, capture and check of one model: what the run of a test, the tuner and the drop-in compiler all do.

Only this module knows what each of these stages needs, and :func:`prepare` their order at one batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_cudagraph import inputs
from pytest_cudagraph.capture import Captures, capture_batches
from pytest_cudagraph.check import check_replays
from pytest_cudagraph.compile import Compiled, compile_model
from pytest_cudagraph.compile.inductor import raised_limits
from pytest_cudagraph.errors import CaptureRefusal
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.inputs.example import opaque_arguments
from pytest_cudagraph.protocols import Backend, CapturedGraph, GraphPool, Model, ShowProgress
from pytest_cudagraph.state import NO_CONSTANTS, Constants, Snapshot, Undo
from pytest_cudagraph.values import Agreement, CompileMode, Disagreement, Receipt


def _show_nothing(line: str) -> None:
    """Where nobody watches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """One model with an example per batch size. Each stage leaves its state and the random generators as they were."""

    model: Model
    examples: Mapping[int, Example]
    backend: Backend
    constants: Constants = NO_CONSTANTS
    """The parameters that eager calls do not write."""
    progress: ShowProgress = _show_nothing

    def at(self, batch_size: int) -> Stages:
        """The same model at one of its batch sizes."""
        return replace(self, examples={batch_size: self.examples[batch_size]})

    @contextmanager
    def restored(self) -> Iterator[Snapshot]:
        """Calls inside change the state. Restore it and the random generators afterwards, also after an error."""
        extras = opaque_arguments(self.examples.values())
        before = Snapshot.take(self.model, extras=extras, constants=self.constants)
        rng = self.backend.rng_state(self.model, extras)
        try:
            yield before
        finally:
            before.restore()
            self.backend.set_rng_state(rng)

    def eager_error(self, batch_size: int) -> Exception | None:
        """The exception that the model itself raises at a batch size."""
        example = inputs.clone(self.examples[batch_size])
        with self.at(batch_size).restored(), self.backend.running():
            try:
                self.model(*example.args, **example.kwargs)
            # A model may raise anything.
            except Exception as error:
                return error
        return None

    def compile(self, mode: CompileMode, *, cache_dir: Path, time_limit_s: float) -> Compiled:
        """Compile for each batch size. Raises what :func:`~pytest_cudagraph.compile.compile_model` raises."""
        if mode == "none":  # calls nothing
            return compile_model(self.model, self.examples, mode, self.backend, cache_dir=cache_dir)
        undo = Undo(self.model, self.backend, extras=opaque_arguments(self.examples.values()), constants=self.constants)
        with undo.undone():
            compiled = compile_model(
                self.model, self.examples, mode, self.backend, cache_dir=cache_dir, time_limit_s=time_limit_s
            )
        undo.assert_unchanged()
        return compiled

    def capture(self, pool: GraphPool, compiled: Compiled | None) -> Captures:
        """Capture the compiled code, or the model itself, at each batch size. The first refusal ends this."""
        return capture_batches(
            self._call_of(compiled), self.examples, pool, model=self.model, backend=self.backend,
            executions=compiled.executions if compiled else lambda _: None, constants=self.constants,
            progress=self.progress,
        )  # fmt: skip

    def check(
        self,
        graphs: Mapping[int, CapturedGraph],
        compiled: Compiled | None,
        captures: Captures | None = None,
        *,
        seed: int = 0,
        rtol: float | None = None,
        atol: float | None = None,
    ) -> Mapping[int, Agreement | Disagreement]:
        """Compare graphs with eager on new inputs. ``captures`` has the state from which they were captured."""
        # For the inputs of the check, code with graph breaks may have to compile another branch.
        with raised_limits() if compiled is not None and compiled.mode == "inductor" else nullcontext():
            return check_replays(
                graphs, lambda _: self.model, self.examples, model=self.model, backend=self.backend, seed=seed,
                rtol=rtol, atol=atol, captured_at=captures.addresses if captures else None,
                size_states=captures.size_states if captures else None, captured_for=self._call_of(compiled),
                constants=self.constants, progress=self.progress,
            )  # fmt: skip

    def _call_of(self, compiled: Compiled | None) -> Callable[[int], Model]:
        return compiled.call_for if compiled else lambda _: self.model


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedCall:
    """A model at one batch size that gives eager's answers: its graph, its compiled code, or the model itself."""

    call: Model
    graph: CapturedGraph | None = None
    captures: Captures | None = None
    """Hold it as long as the graph is used: it keeps memory alive that the graph reads by address."""


def prepare(stages: Stages, batch_size: int, compiled: Compiled | None, pool: GraphPool | None) -> PreparedCall:
    """Capture a batch size into ``pool``, and check it. Without a pool only compiled code is checked.

    Raises :class:`~pytest_cudagraph.errors.CaptureRefusal`, also for a difference from eager, and what capture and
    check raise.
    """
    stages = stages.at(batch_size)
    if pool is None:
        call = compiled.call_for(batch_size) if compiled else stages.model
        if compiled is not None and compiled.mode != "none":
            _refuse_difference(stages, _CodeAsGraph(call, batch_size), compiled)
        return PreparedCall(call=call)
    captures = stages.capture(pool, compiled)
    if captures.refused is not None:
        raise captures.refused
    graph = captures.graphs[batch_size]
    try:
        _refuse_difference(stages, graph, compiled, captures)
    except BaseException:
        with suppress(RuntimeError):  # a failed device: raise the first error
            graph.close()
        raise
    return PreparedCall(call=graph, graph=graph, captures=captures)


def _refuse_difference(
    stages: Stages, graph: CapturedGraph, compiled: Compiled | None, captures: Captures | None = None
) -> None:
    batch_size = graph.receipt.batch_size
    result = stages.check({batch_size: graph}, compiled, captures)[batch_size]
    if isinstance(result, Disagreement):
        raise CaptureRefusal("; ".join((f"{result.where} differs from eager: {result.message}", *result.evidence)))


class _CodeAsGraph:
    """Compiled code with the interface of a graph, so that the same check applies to both."""

    def __init__(self, call: Model, batch_size: int) -> None:
        self._call = call
        self.replays = 0
        self.receipt = Receipt(batch_size=batch_size, operations=None, kernels=None, opaque_regions=1)

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
