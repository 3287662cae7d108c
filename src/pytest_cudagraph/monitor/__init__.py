"""What happens while code runs: load, clocks and memory of host and GPUs."""

from pytest_cudagraph.monitor.card import GpuCard, GpuSample, HostSample, PerfCard
from pytest_cudagraph.monitor.perf_monitor import PerfMonitor
