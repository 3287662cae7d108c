"""Load, clocks and memory of the host and the GPUs during a block of code."""

from pytest_cudagraph.monitor.card import GpuCard, GpuSample, HostSample, PerfCard
from pytest_cudagraph.monitor.perf_monitor import PerfMonitor

__all__ = ["GpuCard", "GpuSample", "HostSample", "PerfCard", "PerfMonitor"]
