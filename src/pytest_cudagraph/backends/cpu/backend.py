"""The twin as a backend: warm up, record, hand out a graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from pytest_cudagraph.backends.buffers import check_output
from pytest_cudagraph.backends.capture_mode import capturing, uncached_autocast
from pytest_cudagraph.backends.cpu.graph import CpuGraph, CpuInputs, LastReplayed
from pytest_cudagraph.backends.cpu.observers import OperationRecorder, SeenMemory, watch_memory
from pytest_cudagraph.backends.cpu.recording import record
from pytest_cudagraph.backends.cpu.tape import Tape
from pytest_cudagraph.protocols import EventTimer, Model
from pytest_cudagraph.values import Kind, Receipt


class CpuRegion:
    """Wraps compiled code; see :class:`~pytest_cudagraph.protocols.CompiledRegion`."""

    def __init__(self, call: Callable[..., Any], label: str) -> None:
        self._call = call
        self._executions = 0
        self.label = label
        # AOTAutograd asks whether the code takes its inputs as one list, which it then empties.
        self._boxed_call = getattr(call, "_boxed_call", False)

    @property
    def executions(self) -> int:
        """How often the code ran for its effect; the run that a recording makes does not count."""
        return self._executions

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        watching = _watching()
        if isinstance(watching, OperationRecorder):
            return watching.record_region(self, args, kwargs)
        if watching is not None:
            watching.see((args, kwargs))
        return self.execute(*args, **kwargs)

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        """Run and count."""
        self._executions += 1
        return self._call(*args, **kwargs)

    def execute_uncounted(self, *args: Any, **kwargs: Any) -> Any:
        """Run for a recording."""
        return self._call(*args, **kwargs)


def _watching() -> OperationRecorder | SeenMemory | None:
    if torch._C._len_torch_dispatch_stack() == 0:  # the usual case, in timed code
        return None
    modes = _get_current_dispatch_mode_stack()
    return next((mode for mode in reversed(modes) if isinstance(mode, (OperationRecorder, SeenMemory))), None)


# As many as torch.cuda.make_graphed_callables runs: compilers and first-call caches have settled by then.
_WARMUPS = 3


class CpuBackend:
    """See :class:`~pytest_cudagraph.protocols.Backend`."""

    kind: Kind = "cpu"
    device: str = "cpu"

    def synchronize(self) -> None:
        """Nothing to wait for: a call on the CPU has ended when it returns."""

    def order_after(self, earlier: Any) -> None:
        """Nothing to order: there are no streams."""

    def running(self) -> AbstractContextManager[None]:
        """Inference mode."""
        return torch.inference_mode()

    def pool(self) -> CpuPool:
        """The graphs of one model."""
        return CpuPool()

    def region(self, call: Callable[..., Any], label: str) -> CpuRegion:
        """Make compiled code one step of a tape; its executions are counted, also those that replays make."""
        return CpuRegion(call, label)

    def event_timer(self) -> EventTimer | None:
        """None: a CPU has no events."""
        return None

    def rng_state(self) -> torch.Tensor:
        """The state of the default CPU generator."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Put back what :meth:`rng_state` gave."""
        torch.set_rng_state(state)


class CpuPool:
    """The graphs of one model. They share no memory, and behave as if: a replay spoils the outputs of its siblings."""

    def __init__(self) -> None:
        self._graphs: list[CpuGraph] = []
        self._turn = LastReplayed()

    def capture(self, model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, batch_size: int) -> CpuGraph:
        """Warm up and record one call of ``model``; see :class:`~pytest_cudagraph.protocols.GraphPool`.

        Raises :class:`~pytest_cudagraph.errors.CaptureRefusal`, or
        :class:`~pytest_cudagraph.errors.InputError` for an output that a graph cannot give.
        """
        inputs = CpuInputs(args, kwargs)
        with torch.inference_mode(), uncached_autocast(), capturing():
            witness = None
            for call in range(_WARMUPS):
                # After the first call, which may build and compile. Two calls know state that takes turns.
                witness = watch_memory() if call == 1 else witness
                static_args, static_kwargs = inputs.arguments()
                with witness or nullcontext():
                    tensors = check_output(model(*static_args, **static_kwargs))
                if witness is not None:
                    witness.see(tensors)
                inputs.load(args, kwargs)  # a model may have written to its inputs
            started_ns = time.perf_counter_ns()
            tape, output = record(model, *inputs.arguments(), witness)
            tape.check_origin(check_output(output))
        receipt = _receipt(tape, inputs, batch_size, time.perf_counter_ns() - started_ns)
        graph = CpuGraph(tape=tape, turn=self._turn, inputs=inputs, output=output, receipt=receipt)
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


def _receipt(tape: Tape, inputs: CpuInputs, batch_size: int, capture_ns: int) -> Receipt:
    return Receipt(
        batch_size=batch_size,
        operations=tape.operations,
        kernels=tape.kernel_names.total(),
        kernel_names=dict(tape.kernel_names),
        opaque_regions=tape.opaque_regions,
        capture_ns=capture_ns,
        memory_bytes=tape.ledger.size_bytes + inputs.bytes,
    )
