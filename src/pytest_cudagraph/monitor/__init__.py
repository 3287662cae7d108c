"""What happens while code runs: load, clocks and memory of host and GPUs, and the calls of serving code."""

from pytest_cudagraph.monitor.call_monitor import CallMonitor
from pytest_cudagraph.monitor.call_summary import CallSummary
from pytest_cudagraph.monitor.card import GpuCard, GpuSample, HostSample, PerfCard
from pytest_cudagraph.monitor.earlier_names import (
    PerformanceMonitor,
    monitor_compilation,
    monitor_evaluation,
    monitor_inference,
    performance_monitor,
)
from pytest_cudagraph.monitor.perf_monitor import PerfMonitor
from pytest_cudagraph.monitor.resource_sampler import ResourceSampler, ResourceSpread
from pytest_cudagraph.monitor.timed_call import CallRecord, TimedCall, note_served
