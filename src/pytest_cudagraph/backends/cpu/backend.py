"""The backend for the CPU: warm up, record, make a graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from pytest_cudagraph.backends.buffers import StaticInputs, check_output
from pytest_cudagraph.backends.capture_mode import capturing, hidden_from_compiler, uncached_autocast
from pytest_cudagraph.backends.cpu.graph import CpuGraph, LastReplayed
from pytest_cudagraph.backends.cpu.recording import OperationRecorder, SeenMemory, record
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
            observer.see((args, kwargs))
        return self._execute(*args, **kwargs)

    def _execute(self, *args: Any, **kwargs: Any) -> Any:
        self._executions += 1
        return self._call(*args, **kwargs)


def _observer() -> OperationRecorder | SeenMemory | None:
    if torch._C._len_torch_dispatch_stack() == 0:  # the usual case, in timed code
        return None
    modes = _get_current_dispatch_mode_stack()
    return next((mode for mode in reversed(modes) if isinstance(mode, (OperationRecorder, SeenMemory))), None)


# As in torch.cuda.make_graphed_callables: by then, compilers and first-call caches have finished.
_WARMUPS = 3


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
            seen = None
            for call in range(_WARMUPS):
                # The first call may build and compile. Two calls also show state that alternates.
                seen = hidden_from_compiler(SeenMemory)() if call == 1 else seen
                static_args, static_kwargs = inputs.arguments()
                with seen or nullcontext():
                    tensors = check_output(model(*static_args, **static_kwargs))
                if seen is not None:
                    seen.see(tensors)
                inputs.copy_in(args, kwargs)  # a model may have written to its inputs
                rewind()
            started_ns = time.perf_counter_ns()
            tape, output = record(model, *inputs.arguments(), seen)
            tape.check_origin(check_output(output))
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
