"""What host and GPU did while some code ran."""

from pytest_cudagraph.monitor.card import GpuCard, GpuSample, HostSample, PerfCard
from pytest_cudagraph.monitor.perf_monitor import PerfMonitor

__all__ = ["GpuCard", "GpuSample", "HostSample", "PerfCard", "PerfMonitor"]
