"""For code written for another ``PerformanceMonitor``: a :class:`CallMonitor` under that one's names, and a shared one.

Nothing imports this module before one of the names is used. New code uses :class:`CallMonitor`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytest_cudagraph.serving.calls.call_export import summary_document
from pytest_cudagraph.serving.calls.call_monitor import CallMonitor
from pytest_cudagraph.serving.calls.timed_call import TimedCall

NAMES = ("PerformanceMonitor", "monitor_compilation", "monitor_evaluation", "monitor_inference", "performance_monitor")


class PerformanceMonitor(CallMonitor):
    """A :class:`CallMonitor` with the names ``measure_performance``, ``get_summary``, ``export_metrics`` and
    ``clear_metrics``."""

    def measure_performance(
        self, name: str, input_tokens: int = 0, batch_size: int | None = None, *, track_cuda_graphs: bool = True
    ) -> MeasuredOperation:
        """A context manager as :meth:`measure`, or a decorator as :meth:`watch`.

        ``track_cuda_graphs`` has no effect: what runners count is always recorded.
        """
        return MeasuredOperation(self, name, input_tokens, batch_size)

    def get_summary(self, last_n: int | None = None) -> dict[str, dict[str, Any]]:
        """As :meth:`summary`, as plain data, by name."""
        return {name: summary_document(each) for name, each in self.summary(last_n).items()}

    export_metrics = CallMonitor.export
    clear_metrics = CallMonitor.clear


class MeasuredOperation(TimedCall):
    """A timed call that is a decorator too."""

    __slots__ = ("_monitor",)

    def __init__(self, monitor: CallMonitor, name: str, tokens: int, batch_size: int | None) -> None:
        super().__init__(monitor, name, tokens, batch_size, None)
        self._monitor = monitor

    def __call__(self, function: Callable[..., Any]) -> Any:
        return self._monitor.watch(self._name, tokens=self.tokens, batch_size=self.batch_size)(function)


performance_monitor = PerformanceMonitor()
"""One monitor for a whole process."""

monitor_inference = performance_monitor.watch("inference")
monitor_compilation = performance_monitor.watch("compilation")
monitor_evaluation = performance_monitor.watch("evaluation")
