"""For code written for another monitor: a :class:`CallMonitor` under that one's names, and a shared one.

Nothing imports this module before one of the names is used. New code uses :class:`CallMonitor`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from pytest_cudagraph.errors import InputError
from pytest_cudagraph.foreign import value_text
from pytest_cudagraph.protocols import Clock
from pytest_cudagraph.serving.calls.call_export import summary_document
from pytest_cudagraph.serving.calls.call_monitor import CallMonitor
from pytest_cudagraph.serving.calls.call_summary import CallTotals
from pytest_cudagraph.serving.calls.timed_call import TimedCall
from pytest_cudagraph.units import NS_PER_MS


class SimplePerformanceMonitor(CallMonitor):
    """A :class:`CallMonitor` with the names of an earlier monitor.

    With ``enable_gpu_monitoring`` a thread reads memory, load, clocks and power once a second, until :meth:`close` or
    the end of the monitor. ``keep`` and ``clock`` as in :class:`CallMonitor`.
    """

    def __init__(self, enable_gpu_monitoring: bool = False, *, keep: int = 1000, clock: Clock | None = None) -> None:
        super().__init__(keep=keep, clock=clock)
        self._optimization: dict[str, float | str] = {}
        reading = ExitStack()
        self.close: Callable[[], object] = weakref.finalize(self, reading.close)
        """Ends the thread."""
        if enable_gpu_monitoring:
            reading.enter_context(self.sampling())

    def measure_performance(
        self, name: str, input_tokens: int = 0, batch_size: int | None = None, *, track_cuda_graphs: bool = True
    ) -> MeasuredOperation:
        """A context manager as :meth:`measure`, or a decorator as :meth:`watch`.

        ``track_cuda_graphs`` has no effect: what runners count is always recorded.
        """
        return MeasuredOperation(self, name, input_tokens, batch_size)

    def get_summary(self, last_n: int | None = None) -> dict[str, Any]:
        """All operations together, and ``operations`` by name. Durations in ms, of operations that succeeded.

        A duration without an operation is None. ``time_range`` is in seconds of the Unix epoch.
        """
        totals, together = self._state(last_n).totals, CallTotals()
        for of_name in totals.values():
            together.merge(of_name)
        summary = together.summary("")
        durations_ns = {
            "avg": summary.mean_ns, "std": summary.standard_deviation_ns, "min": summary.minimum_ns,
            "median": summary.p50_ns, "p99": summary.p99_ns, "max": summary.maximum_ns,
        }  # fmt: skip
        return {
            "total_operations": summary.calls,
            "failed_operations": summary.failed,
            "error_rate": summary.failed / summary.calls if summary.calls else 0.0,
            **{f"{key}_duration_ms": None if ns is None else ns / NS_PER_MS for key, ns in durations_ns.items()},
            "total_tokens": summary.tokens,
            "tokens_per_second": summary.tokens_per_s,
            "cuda_graphs_used": summary.served.get("graph", 0),
            "cuda_graph_hit_ratio": summary.graph_hit_ratio,
            "time_range": {"start": summary.started_at_s, "end": summary.ended_at_s} if summary.calls else None,
            "operations": {name: summary_document(of_name.summary(name)) for name, of_name in totals.items()},
        }

    def get_performance_summary(self) -> dict[str, Any]:
        """As :meth:`get_summary`, with ``optimization_metrics`` and ``resources``: the spread of each reading."""
        resources = [asdict(spread) for spread in self._state().resources]
        return {**self.get_summary(), "optimization_metrics": dict(self._optimization), "resources": resources}

    def update_optimization_metrics(self, metrics: Mapping[str, Any] | None = None, /, **values: Any) -> None:
        """Keep the last value of each name, for :meth:`get_performance_summary`.

        Raises :class:`~pytest_cudagraph.errors.InputError` for what is no number and no text.
        """
        __tracebackhide__ = True
        updated = {**(metrics or {}), **values}
        for name, value in updated.items():
            if not isinstance(value, int | float | str):
                raise InputError(f"an optimization metric is a number or a text; found {name}={value_text(value)}")
        self._optimization.update(updated)

    @property
    def metrics_history(self) -> list[dict[str, Any]]:
        """The last operations one by one, the oldest first: at most ``keep``."""
        return [record._asdict() for record in self.records()]

    export_metrics = CallMonitor.export

    def clear_metrics(self) -> None:
        """Forget all operations, readings and optimization metrics."""
        self.clear()
        self._optimization.clear()


PerformanceMonitor = SimplePerformanceMonitor


class MeasuredOperation(TimedCall):
    """A timed call that is a decorator too."""

    __slots__ = ("_monitor",)

    def __init__(self, monitor: CallMonitor, name: str, tokens: int, batch_size: int | None) -> None:
        super().__init__(monitor, name, tokens, batch_size, None)
        self._monitor = monitor

    def __call__(self, function: Callable[..., Any]) -> Any:
        return self._monitor.watch(self._name, tokens=self.tokens, batch_size=self.batch_size)(function)


performance_monitor = SimplePerformanceMonitor()
"""One monitor for a whole process."""

monitor_inference = performance_monitor.watch("inference")
monitor_compilation = performance_monitor.watch("compilation")
monitor_evaluation = performance_monitor.watch("evaluation")
