"""The calls of serving code: how long they took, what they made, and what served them."""

from pytest_cudagraph.serving.calls.call_monitor import CallMonitor
from pytest_cudagraph.serving.calls.call_summary import CallSummary
from pytest_cudagraph.serving.calls.resource_sampler import ResourceSampler, ResourceSpread
from pytest_cudagraph.serving.calls.timed_call import CallRecord, TimedCall, note_served
