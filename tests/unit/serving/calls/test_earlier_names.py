"""The names of an earlier monitor: the same records, and nothing is made before one of them is used."""

import subprocess
import sys

import pytest
from tests.fake_clock import FakeClock

from pytest_cudagraph import CallMonitor
from pytest_cudagraph.serving import calls

MS = 1_000_000

UNUSED = """
import os, sys
made = []
os.register_at_fork = lambda **handlers: made.extend(str(getattr(each, "__module__", "")) for each in handlers.values())
import torch
from pytest_cudagraph import CallMonitor, GraphRunner, tune
import pytest_cudagraph.serving.calls
print([name for name in made if name.startswith("pytest_cudagraph")], "earlier" in str(list(sys.modules)))
CallMonitor()
print([name for name in made if name.startswith("pytest_cudagraph")])
"""


def test_importing_the_runner_makes_no_monitor_and_registers_nothing_at_fork():
    done = subprocess.run([sys.executable, "-c", UNUSED], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[] False", "['pytest_cudagraph.child_process']"]


def test_the_names_of_another_monitor_record_the_same(tmp_path):
    clock = FakeClock()
    monitor = calls.PerformanceMonitor(clock=clock)

    @monitor.measure_performance("step", track_cuda_graphs=True)
    def step():
        clock.time_ns += MS

    step()
    with monitor.measure_performance("step", 12, 4):
        clock.time_ns += MS
    summary = monitor.get_summary(last_n=5)["step"]
    assert (summary["calls"], summary["tokens"], summary["duration_seconds"]["mean"]) == (2, 12, 0.001)
    monitor.export_metrics(tmp_path / "metrics.json")
    assert CallMonitor.merged(tmp_path / "metrics.json").summary()["step"].calls == 2
    monitor.clear_metrics()
    assert monitor.get_summary() == {}


def test_the_shared_monitor_has_decorators_for_a_pipeline():
    shared = calls.performance_monitor
    try:
        for decorator in (calls.monitor_inference, calls.monitor_compilation, calls.monitor_evaluation):
            assert decorator(lambda: 3)() == 3
        assert calls.performance_monitor is shared
        assert list(shared.summary()) == ["inference", "compilation", "evaluation"]
    finally:
        shared.clear()


def test_another_name_is_missing_as_in_any_module():
    with pytest.raises(AttributeError, match=r"module 'pytest_cudagraph\.serving\.calls' has no attribute 'other'"):
        calls.other  # noqa: B018
