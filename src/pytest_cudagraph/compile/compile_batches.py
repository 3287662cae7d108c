"""The compile stage: the model as it is, under ``torch.compile``, or as an AOTInductor package, per batch size."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_cudagraph.compile.aot import AotCompiler
from pytest_cudagraph.compile.cache import PackageCache
from pytest_cudagraph.compile.inductor import RegionCompiler, compile_lazily, raised_limits, settle
from pytest_cudagraph.compile.time_limit import Deadline, stopped_at
from pytest_cudagraph.errors import CompileTimeout, CudagraphError, InputError, first_line
from pytest_cudagraph.inputs import Example, clone
from pytest_cudagraph.protocols import Backend, CompiledRegion, Model
from pytest_cudagraph.values import CompileMode


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledBatch:
    """The model compiled for one batch size. ``regions`` is None where nothing was compiled."""

    call: Model
    regions: Sequence[CompiledRegion] | None
    compile_ns: int
    notes: tuple[str, ...] = ()

    @property
    def executions(self) -> int | None:
        """How often compiled code ran, summed over the regions."""
        return None if self.regions is None else sum(region.executions for region in self.regions)


class Compiled:
    """One model, compiled for each of its batch sizes. As a context manager it releases the compiled code on exit."""

    def __init__(self, mode: CompileMode, batches: Mapping[int, CompiledBatch]) -> None:
        self.mode = mode
        self._batches = dict(batches)
        self.compile_ns: Mapping[int, int] = {size: batch.compile_ns for size, batch in batches.items()}
        self.notes = _notes(batches)

    def call_for(self, batch_size: int) -> Model:
        """The call to run and to capture at this batch size."""
        __tracebackhide__ = True
        return self._batch(batch_size).call

    def executions(self, batch_size: int) -> int | None:
        """Runs of this batch size's compiled regions so far. None if nothing is compiled."""
        return self._batch(batch_size).executions

    def regions(self, batch_size: int) -> int | None:
        """Compiled pieces, one per graph and kind of input (made in inference mode or not). None in mode none."""
        regions = self._batch(batch_size).regions
        return None if regions is None else len(regions)

    def close(self) -> None:
        """Release the compiled code. A second call does nothing."""
        self._batches.clear()

    def __enter__(self) -> Compiled:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _batch(self, batch_size: int) -> CompiledBatch:
        __tracebackhide__ = True
        if batch_size in self._batches:
            return self._batches[batch_size]
        sizes = ", ".join(map(str, self._batches)) or "none (closed)"
        raise InputError(f"the model is not compiled for batch {batch_size}, only for: {sizes}")


def _notes(batches: Mapping[int, CompiledBatch]) -> tuple[str, ...]:
    """Each note once, with its batch sizes."""
    sizes: dict[str, list[str]] = {}
    for size, batch in batches.items():
        for note in batch.notes:
            sizes.setdefault(note, []).append(str(size))
    return tuple(f"batch {', '.join(of)}: {note}" for note, of in sizes.items())


TIME_LIMIT_S = 600.0

_Step = Callable[[int, Example], CompiledBatch]
"""Compiles for one batch size. The caller fills in the time."""


def compile_model(
    model: Model,
    examples: Mapping[int, Example],
    mode: CompileMode,
    backend: Backend,
    *,
    cache_dir: Path,
    time_limit_s: float = TIME_LIMIT_S,
) -> Compiled:
    """Compile ``model`` for each batch size, and verify that compiled code runs.

    This calls the model, so the caller restores its state. ``time_limit_s`` limits all batch sizes together. Outside
    the main thread and on Windows, ``inductor`` checks it only after each compile. Raises
    :class:`~pytest_cudagraph.errors.CompileTimeout`, and :class:`~pytest_cudagraph.errors.CudagraphError` if a compile
    fails, if compiled code does not run, or if the model is already compiled.
    """
    _refuse_compiled(model)
    if mode == "none":
        return Compiled(mode, {size: CompiledBatch(call=model, regions=None, compile_ns=0) for size in examples})
    deadline = Deadline(time_limit_s)
    step = _inductor(model, backend) if mode == "inductor" else _aot(model, backend, cache_dir, deadline)
    return Compiled(mode, {size: _guarded(step, size, example, deadline, mode) for size, example in examples.items()})


def _inductor(model: Model, backend: Backend) -> _Step:
    def step(size: int, example: Example) -> CompiledBatch:
        compiler = RegionCompiler(backend, f"inductor batch {size} region")
        call = compile_lazily(model, compiler)
        with backend.running(), raised_limits():
            settle(call, compiler.regions, example)
        return CompiledBatch(call=call, regions=compiler.regions, compile_ns=0)

    return step


def _aot(model: Model, backend: Backend, cache_dir: Path, deadline: Deadline) -> _Step:
    compiler = AotCompiler(backend=backend, cache=PackageCache(cache_dir / "aot"), deadline=deadline)

    def step(size: int, example: Example) -> CompiledBatch:
        with backend.running():
            call, region, notes = compiler.compile(model, clone(example), f"aot batch {size}")
            settle(call, [region], example)
        return CompiledBatch(call=call, regions=[region], compile_ns=0, notes=notes)

    return step


def _guarded(step: _Step, size: int, example: Example, deadline: Deadline, mode: CompileMode) -> CompiledBatch:
    """Compile one batch size within the time limit, and translate errors."""
    started_ns = time.perf_counter_ns()
    try:
        # Compilers warn about their own deprecations. The warnings of the model were shown by its eager run.
        with stopped_at(deadline, mode, size), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            batch = step(size, example)
    except CompileTimeout:
        raise
    except TimeoutError:
        raise deadline.timeout(mode, size) from None
    except Exception as exc:
        # A compiler may raise anything. The message names the stage, the batch size and the remedy.
        raise CudagraphError(_failure_text(exc, size, mode)) from exc
    elapsed_ns = time.perf_counter_ns() - started_ns
    return CompiledBatch(call=batch.call, regions=batch.regions, compile_ns=elapsed_ns, notes=batch.notes)


def _failure_text(exc: Exception, size: int, mode: CompileMode) -> str:
    # Errors of this package already name their remedy.
    cause = str(exc) if isinstance(exc, CudagraphError) else first_line(exc)
    remedy = "" if isinstance(exc, CudagraphError) and "  to " in cause else "\n  to continue without: compile='none'"
    return f"compile={mode!r} failed at batch {size}: {cause}{remedy}"


def _refuse_compiled(model: Model) -> None:
    # torch.compile(model), torch.compile(function), module.compile() and torch.compiler.disable() leave these marks.
    marks = ("_orig_mod", "_torchdynamo_orig_callable", "_compiled_call_impl")
    is_disabled = getattr(model, "_torchdynamo_disable", False)
    if not is_disabled and any(getattr(model, mark, None) is not None for mark in marks):
        raise CudagraphError(
            "the model is already compiled, but the audit needs the eager operations\n"
            "  to fix: pass the eager module and use compile='inductor'"
        )
