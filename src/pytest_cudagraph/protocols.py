"""The interfaces of a backend, a captured graph, a clock and a stopping rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from pytest_cudagraph.values import Block, Decision, Kind, Receipt

Model = Callable[..., Any]
"""Any callable on pytrees of tensors, usually an ``nn.Module``."""


ShowProgress = Callable[[str], None]
"""Shows the progress to the user. Does nothing where nobody watches."""


class CapturedGraph(Protocol):
    """A graph for one batch size. It owns its static inputs and outputs until :meth:`close`."""

    @property
    def receipt(self) -> Receipt: ...

    @property
    def replays(self) -> int:
        """Launches since capture."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Copy the arguments into the static inputs, replay, return the static outputs.

        The next replay overwrites the outputs. Does not synchronise. Raises
        :class:`~pytest_cudagraph.errors.InputError` for another structure, shape, dtype or device, and for a plain
        Python argument that differs from the captured one.
        """
        ...

    def replay_leaves(self, leaves: Sequence[Any]) -> Any:
        """As a call, for a caller that has compared the leaves of the arguments with those of the capture."""
        ...

    def replay(self) -> Any:
        """Launch once on the values that the static inputs hold now. Return the static outputs."""
        ...

    def poison(self) -> None:
        """Fill every output buffer with NaN, or with a sentinel for integers and booleans."""
        ...

    def close(self) -> None:
        """Release the graph and its buffers. A second call does nothing."""
        ...


@runtime_checkable
class MeasuresBusyTime(Protocol):
    """A graph that measures the time of its operations, for a device without events."""

    def busy_ns(self) -> float:
        """Replay once, and return the sum of the times of all operations, in ns."""
        ...


class GraphPool(Protocol):
    """The memory that the graphs of one model share. Leaving this context manager closes every graph."""

    def capture(
        self,
        model: Model,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        batch_size: int,
        rewind: Callable[[], None] = lambda: None,
    ) -> CapturedGraph:
        """Warm up, then capture one call of ``model`` on copies of the inputs.

        ``rewind`` runs after each warm-up, on its stream, and restores the values of the state in place: a cache may
        have only one place left. The capture stage undoes all other changes (attributes, random numbers). Raises
        :class:`~pytest_cudagraph.errors.CaptureRefusal` with CUDA's words and the user's line. The process and the
        pool remain usable afterwards.
        """
        ...

    def close(self) -> None: ...

    def __enter__(self) -> GraphPool: ...

    def __exit__(self, *exc_info: object) -> None: ...


@runtime_checkable
class Backend(Protocol):
    """One kind of device: how to capture graphs and how to wait for them."""

    @property
    def kind(self) -> Kind: ...

    @property
    def device(self) -> str:
        """The torch device string: ``cuda:0`` or ``cpu``."""
        ...

    def synchronize(self) -> None:
        """Wait for all launched work. Does nothing on the CPU."""
        ...

    def order_after(self, earlier: Any) -> Any:
        """Let the current stream wait for the stream ``earlier``. Return the current stream.

        For threads that launch on their own streams and share buffers. Pass the returned stream to the next call, and
        None to the first.
        """
        ...

    def running(self) -> AbstractContextManager[None]:
        """The mode for eager, compiled and captured code: inference mode, with this device current."""
        ...

    def pool(self) -> GraphPool: ...

    def region(self, call: Callable[..., Any], label: str) -> CompiledRegion:
        """Wrap compiled code: a capture treats it as one node, and its executions are counted."""
        ...

    def event_timer(self) -> EventTimer | None:
        """A timer of device time, for diagnosis, or None for a device without events."""
        ...

    def rng_state(self, *roots: Any) -> Any:
        """The states of the default random generators of the device and the CPU, and of those that ``roots`` hold."""
        ...

    def set_rng_state(self, state: Any) -> None: ...


class CompiledRegion(Protocol):
    """Compiled code whose executions are counted. A recording sees it as one operation."""

    @property
    def executions(self) -> int:
        """Executions by direct calls, and by replays on the CPU twin. Recordings do not count."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class EventTimer(Protocol):
    """Measures device time by events, in addition to the host clock."""

    def time_ns(self, call: Callable[[], object]) -> float:
        """The device time of ``call``, in ns."""
        ...


@runtime_checkable
class Clock(Protocol):
    """The source of measured time. Tests use a clock that the measured code advances."""

    @property
    def resolution_ns(self) -> float: ...

    def now_ns(self) -> int: ...

    def cpu_time_ns(self) -> int:
        """CPU time of this thread, which does not pass while it waits."""
        ...


class StoppingRule(Protocol):
    """Decides when a measurement can end. One object for each measurement. The loop enforces the hard bounds."""

    @property
    def target_ratio(self) -> float | None: ...

    @property
    def boundary_ratio(self) -> float | None:
        """The tested ratio: the target minus its tolerance, or None if there is no target."""
        ...

    @property
    def decision(self) -> Decision: ...

    def add(self, block: Block) -> None: ...

    def is_finished(self, elapsed_ns: float) -> bool: ...
