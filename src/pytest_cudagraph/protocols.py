"""The seams: what a backend, a captured graph, a clock and a stopping rule must offer.

A third backend (ROCm, XPU) is one module that satisfies :class:`Backend`; nothing else changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from pytest_cudagraph.values import Block, Decision, Kind, Receipt, SavedBatch

Model = Callable[..., Any]
"""Any callable on pytrees of tensors; usually an ``nn.Module``."""


ShowProgress = Callable[[str], None]
"""Tells a reader what is going on; does nothing where nobody watches."""


class CapturedGraph(Protocol):
    """One graph for one batch size. It owns its static inputs and outputs until :meth:`close`."""

    @property
    def receipt(self) -> Receipt: ...

    @property
    def replays(self) -> int:
        """How often the graph was launched since capture."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Copy the arguments into the static inputs, replay, return the static outputs.

        The outputs live in the graph's own buffers: the next replay overwrites them. Raises
        :class:`~pytest_cudagraph.errors.InputError` for another structure, shape, dtype, device, or for a
        plain Python argument that differs from the one captured. Does not synchronise.
        """
        ...

    def replay(self) -> Any:
        """Launch once on what the static inputs hold now; return the static outputs."""
        ...

    def poison(self) -> None:
        """Fill every output buffer with NaN (or a sentinel for integers and booleans)."""
        ...

    def close(self) -> None:
        """Release the graph and its buffers; a second call does nothing."""
        ...


@runtime_checkable
class TellsBusyTime(Protocol):
    """A graph that can tell how long its operations take by themselves; where device events tell, none need."""

    def busy_ns(self) -> float:
        """Replay once on what the static inputs hold, and give the sum over its operations."""
        ...


class GraphPool(Protocol):
    """The memory that the graphs of one model share. A context manager: leaving it closes every graph."""

    def capture(
        self, model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, batch_size: int
    ) -> CapturedGraph:
        """Warm up, then capture one call of ``model`` on copies of the inputs.

        Warm-up and capture change state (buffers, RNG); undoing that is the capture stage's work. Raises
        :class:`~pytest_cudagraph.errors.CaptureRefusal` with CUDA's words and the user's line; afterwards the
        process and the pool remain usable.
        """
        ...

    def close(self) -> None: ...

    def __enter__(self) -> GraphPool: ...

    def __exit__(self, *exc_info: object) -> None: ...


class Backend(Protocol):
    """How graphs are captured and awaited on one kind of device."""

    @property
    def kind(self) -> Kind: ...

    @property
    def device(self) -> str:
        """The torch device string: ``cuda:0`` or ``cpu``."""
        ...

    def synchronize(self) -> None:
        """Wait until everything launched has run. Does nothing on the CPU."""
        ...

    def order_after(self, earlier: Any) -> Any:
        """Let what is launched from here on wait for what was launched where ``earlier`` was given; give the next one.

        For threads that launch on streams of their own and share buffers. ``earlier`` is None the first time.
        """
        ...

    def running(self) -> AbstractContextManager[None]:
        """The mode in which eager, compiled and captured code all run (inference mode, right device)."""
        ...

    def pool(self) -> GraphPool: ...

    def region(self, call: Callable[..., Any], label: str) -> CompiledRegion:
        """Wrap compiled code so that a capture treats it as one node and its executions are counted."""
        ...

    def event_timer(self) -> EventTimer | None:
        """A diagnostic timer of device time between two points, or None where there is none."""
        ...

    def rng_state(self) -> Any:
        """The state of every default generator that ``running`` code may draw from."""
        ...

    def set_rng_state(self, state: Any) -> None: ...


class CompiledRegion(Protocol):
    """Compiled code, opaque to the recorder, whose executions are counted."""

    @property
    def executions(self) -> int:
        """Real executions, by a direct call or by a replay the recorder drives; not recordings."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class EventTimer(Protocol):
    """Device time by events, as a second reading beside the host clock."""

    def time_ns(self, call: Callable[[], object]) -> float: ...


@runtime_checkable
class Clock(Protocol):
    """Where measured time comes from. Tests hand in a clock that the measured code itself advances."""

    @property
    def resolution_ns(self) -> float: ...

    def now_ns(self) -> int: ...


class StoppingRule(Protocol):
    """When a measurement has seen enough. One object per measurement; hard bounds stay outside, in the loop."""

    @property
    def target_ratio(self) -> float | None: ...

    @property
    def boundary_ratio(self) -> float | None:
        """The ratio actually tested: the target less its tolerance. None where there is no target."""
        ...

    @property
    def decision(self) -> Decision: ...

    def add(self, block: Block) -> None: ...

    def is_finished(self, elapsed_ns: float) -> bool: ...


class Store(Protocol):
    """Where baselines are kept between runs: one entry per name and batch size, which together are its key."""

    def load(self) -> dict[tuple[str, int], SavedBatch]:
        """Everything saved; empty when there is nothing yet. Raises :class:`~pytest_cudagraph.errors.BaselineError`."""
        ...

    def merge(self, saved: Iterable[SavedBatch], *, commit_info: Mapping[str, Any], continues: bool = False) -> None:
        """Add or replace these entries; all others, also those written meanwhile, stay as they are.

        With ``continues`` an entry that found what is saved adds its session to those kept instead.
        """
        ...

    def remove(self, keys: Iterable[tuple[str, int]]) -> None:
        """Forget these entries; a key that is not there is no error."""
        ...
