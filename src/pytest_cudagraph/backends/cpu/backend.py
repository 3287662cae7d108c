"""The backend for the CPU: warm up, record, make a graph."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from pytest_cudagraph import pytree
from pytest_cudagraph.backends.buffers import StaticInputs, check_output
from pytest_cudagraph.backends.capture_mode import capturing, hidden_from_compiler, uncached_autocast
from pytest_cudagraph.backends.cpu.graph import CpuGraph, LastReplayed
from pytest_cudagraph.backends.cpu.hidden_writes import WatchedWarmUp
from pytest_cudagraph.backends.cpu.recording import OperationRecorder, record
from pytest_cudagraph.backends.cpu.tape import OpaqueCall, Tape
from pytest_cudagraph.backends.generators import GeneratorStates, generators_of, set_states, states_of
from pytest_cudagraph.protocols import EventTimer, Model
from pytest_cudagraph.values import Kind, Receipt


class CpuRegion:
    """Compiled code, one step of a tape. See :class:`~pytest_cudagraph.protocols.CompiledRegion`."""

    def __init__(self, call: Callable[..., Any], label: str) -> None:
        self._call = call
        self._executions = 0
        self.label = label
        # AOTAutograd reads this attribute: does the code take its inputs as one list, and empty it?
        self._boxed_call = getattr(call, "_boxed_call", False)

    @property
    def executions(self) -> int:
        """How often the code ran, without the runs for a recording."""
        return self._executions

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        observer = _observer()
        if isinstance(observer, OperationRecorder):
            return observer.record_region(OpaqueCall(self.label, self._call, self._execute), args, kwargs)
        if observer is not None:
            return observer.call_region(self._execute, args, kwargs)
        return self._execute(*args, **kwargs)

    def _execute(self, *args: Any, **kwargs: Any) -> Any:
        self._executions += 1
        return self._call(*args, **kwargs)


def _observer() -> OperationRecorder | WatchedWarmUp | None:
    if torch._C._len_torch_dispatch_stack() == 0:  # the usual case, in timed code
        return None
    modes = _get_current_dispatch_mode_stack()
    return next((mode for mode in reversed(modes) if isinstance(mode, (OperationRecorder, WatchedWarmUp))), None)


class CpuBackend:
    """See :class:`~pytest_cudagraph.protocols.Backend`."""

    kind: Kind = "cpu"
    device: str = "cpu"

    def synchronize(self) -> None:
        """Do nothing: a call on the CPU has finished when it returns."""

    def order_after(self, earlier: Any) -> None:
        """Do nothing: a CPU has no streams."""

    def running(self) -> AbstractContextManager[None]:
        """Inference mode."""
        return torch.inference_mode()

    def pool(self) -> CpuPool:
        """The graphs of one model."""
        return CpuPool()

    def region(self, call: Callable[..., Any], label: str) -> CpuRegion:
        """Make compiled code one step of a tape, and count its executions, those of replays too."""
        return CpuRegion(call, label)

    def event_timer(self) -> EventTimer | None:
        """None: a CPU has no events."""
        return None

    def rng_state(self, *roots: Any) -> tuple[torch.Tensor, GeneratorStates]:
        """The state of the default CPU generator, and of those that ``roots`` hold."""
        return torch.get_rng_state(), states_of(generators_of("cpu", *roots))

    def set_rng_state(self, state: tuple[torch.Tensor, GeneratorStates]) -> None:
        """Restore what :meth:`rng_state` returned."""
        torch.set_rng_state(state[0])
        set_states(state[1])


class CpuPool:
    """The graphs of one model. A replay of one overwrites the outputs of the others, as in shared memory."""

    def __init__(self) -> None:
        self._graphs: list[CpuGraph] = []
        self._last = LastReplayed()

    def capture(
        self,
        model: Model,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        batch_size: int,
        rewind: Callable[[], None] = lambda: None,
    ) -> CpuGraph:
        """Warm up and record one call of ``model``. See :class:`~pytest_cudagraph.protocols.GraphPool`.

        Raises :class:`~pytest_cudagraph.errors.CaptureRefusal`, and
        :class:`~pytest_cudagraph.errors.InputError` for an output that a graph cannot return.
        """
        inputs = StaticInputs(args, kwargs)
        with torch.inference_mode(), uncached_autocast(), capturing():
            warm_up = _warmed_up(model, inputs, args, kwargs, rewind)
            started_ns = time.perf_counter_ns()
            tape, output = record(model, *inputs.arguments(), warm_up)
            tape.check_origin(check_output(output))
            if warm_up.refusal is not None:
                raise warm_up.refusal
        receipt = _receipt(tape, inputs, batch_size, time.perf_counter_ns() - started_ns)
        graph = CpuGraph(tape=tape, last=self._last, inputs=inputs, output=output, receipt=receipt)
        self._graphs.append(graph)
        return graph

    def close(self) -> None:
        """Close every graph."""
        while self._graphs:
            self._graphs.pop().close()

    def __enter__(self) -> CpuPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _warmed_up(
    model: Model, inputs: StaticInputs, args: tuple[Any, ...], kwargs: Mapping[str, Any], rewind: Callable[[], None]
) -> WatchedWarmUp:
    """Call three times, as ``torch.cuda.make_graphed_callables`` does. The first call may build and compile.

    Two watched calls also show state that alternates. One of them is on other values, because those of the example may
    hide a write, as a mask that masks nothing does.
    """

    def start_again() -> None:
        inputs.copy_in(args, kwargs)  # a model may have written to its inputs
        rewind()

    def call(function: Callable[..., Any]) -> None:
        static_args, static_kwargs = inputs.arguments()
        check_output(function(static_args, static_kwargs))
        start_again()

    warm_up = hidden_from_compiler(WatchedWarmUp)()
    watched = functools.partial(warm_up.call, model)
    call(lambda args, kwargs: model(*args, **kwargs))
    try:
        for tensor in pytree.tensors_in(inputs.arguments()):
            _ = tensor.neg_() if tensor.is_floating_point() or tensor.is_complex() else tensor.zero_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user did not give these values
            call(watched)
    # The model need not accept them.
    except Exception:
        start_again()
        call(watched)
    call(watched)
    return warm_up


def _receipt(tape: Tape, inputs: StaticInputs, batch_size: int, capture_ns: int) -> Receipt:
    return Receipt(
        batch_size=batch_size,
        operations=tape.operations,
        kernels=tape.kernel_names.total(),
        kernel_names=dict(tape.kernel_names),
        opaque_regions=tape.opaque_regions,
        capture_ns=capture_ns,
        memory_bytes=tape.storages.size_bytes + inputs.bytes,
    )
