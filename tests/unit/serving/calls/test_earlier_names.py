"""The names of an earlier monitor: the same records, and nothing is made before one of them is used."""

import gc
import subprocess
import sys
import threading

import pytest
import torch
from tests.fake_clock import FakeClock
from torch import nn

from pytest_cudagraph import CallMonitor, serving
from pytest_cudagraph.errors import InputError

MS = 1_000_000

UNUSED = """
import os, sys
made = []
os.register_at_fork = lambda **handlers: made.extend(str(getattr(each, "__module__", "")) for each in handlers.values())
import torch
from pytest_cudagraph import CallMonitor, GraphRunner, tune
import pytest_cudagraph.serving
print([name for name in made if name.startswith("pytest_cudagraph")], "earlier" in str(list(sys.modules)))
CallMonitor()
print([name for name in made if name.startswith("pytest_cudagraph")])
"""


def test_importing_the_runner_makes_no_monitor_and_registers_nothing_at_fork():
    done = subprocess.run([sys.executable, "-c", UNUSED], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[] False", "['pytest_cudagraph.child_process']"]


def test_the_names_of_another_monitor_record_the_same(tmp_path):
    clock = FakeClock()
    monitor = serving.PerformanceMonitor(clock=clock)

    @monitor.measure_performance("step", track_cuda_graphs=True)
    def step():
        clock.time_ns += MS

    step()
    with monitor.measure_performance("step", 12, 4):
        clock.time_ns += MS
    summary = monitor.get_summary(last_n=5)["operations"]["step"]
    assert (summary["calls"], summary["tokens"], summary["duration_seconds"]["mean"]) == (2, 12, 0.001)
    monitor.export_metrics(tmp_path / "metrics.json")
    assert CallMonitor.merged(tmp_path / "metrics.json").summary()["step"].calls == 2
    monitor.clear_metrics()
    assert monitor.get_summary()["total_operations"] == 0


def test_the_shared_monitor_has_decorators_for_a_pipeline():
    shared = serving.performance_monitor
    try:
        for decorator in (serving.monitor_inference, serving.monitor_compilation, serving.monitor_evaluation):
            assert decorator(lambda: 3)() == 3
        assert serving.performance_monitor is shared
        assert list(shared.summary()) == ["inference", "compilation", "evaluation"]
    finally:
        shared.clear()


def test_another_name_is_missing_as_in_any_module():
    with pytest.raises(AttributeError, match=r"module 'pytest_cudagraph\.serving' has no attribute 'other'"):
        serving.other  # noqa: B018


def test_the_summary_of_all_operations_is_flat():
    clock = FakeClock()
    monitor = serving.SimplePerformanceMonitor(clock=clock)
    empty = monitor.get_summary()
    assert (empty["total_operations"], empty["avg_duration_ms"], empty["time_range"]) == (0, None, None)
    for name, ms in (("prefill", 4), ("decode", 1), ("decode", 1)):
        with monitor.measure_performance(name, input_tokens=2):
            clock.time_ns += ms * MS
    with pytest.raises(KeyError), monitor.measure_performance("decode"):
        raise KeyError
    summary = monitor.get_summary()
    shown = {key: summary[f"{key}_duration_ms"] for key in ("avg", "std", "min", "median", "max")}
    assert shown == pytest.approx({"avg": 2.0, "std": 3**0.5, "min": 1.0, "median": 1.0, "max": 4.0}, rel=0.008)
    assert (summary["total_operations"], summary["error_rate"], summary["total_tokens"]) == (4, 0.25, 6)
    assert summary["time_range"]["end"] - summary["time_range"]["start"] == pytest.approx(0.006, abs=1e-6)
    assert set(summary["operations"]) == {"prefill", "decode"}
    assert [each["name"] for each in monitor.metrics_history] == ["prefill", "decode", "decode", "decode"]


def test_the_performance_summary_has_readings_and_the_last_optimization_metrics():
    monitor = serving.SimplePerformanceMonitor(enable_gpu_monitoring=True)
    thread = next(each for each in threading.enumerate() if each.name == "perf-monitor")
    monitor.update_optimization_metrics(graphs=2, mode="default")
    monitor.update_optimization_metrics({"graphs": 3})
    with pytest.raises(InputError, match=r"an optimization metric is a number or a text; found rows=\[1\]"):
        monitor.update_optimization_metrics(rows=[1])
    monitor.close()
    assert not thread.is_alive()
    summary = monitor.get_performance_summary()
    assert summary["optimization_metrics"] == {"graphs": 3, "mode": "default"}
    assert "rss_bytes" in {each["reading"] for each in summary["resources"]}
    monitor.clear_metrics()
    assert monitor.get_performance_summary()["optimization_metrics"] == {}


def test_the_thread_of_the_readings_ends_with_its_monitor():
    monitor = serving.SimplePerformanceMonitor(enable_gpu_monitoring=True)
    thread = next(each for each in threading.enumerate() if each.name == "perf-monitor")
    del monitor
    gc.collect()
    assert not thread.is_alive()


def test_the_lines_of_another_compiler_run_with_one_import_changed(tmp_path):
    model, x = nn.Linear(4, 4).eval(), torch.randn(2, 4)
    for is_compiled in (True, False):
        with serving.IntegratedAOTCompiler(
            cache_dir=tmp_path, enable_aot=is_compiled, max_compilation_time=300, batch_sizes=(2,), device="cpu"
        ) as compiler:
            served = compiler.compile_model_aot(model, (x,), {"model_name": "ranker"}, "default")
            torch.testing.assert_close(served(x), model(x))
            stats = compiler.get_enhancement_stats()
        assert (stats["total_calls"], stats["graph_calls"], stats["graph_hit_ratio"]) == (1, 1, 1.0)
        assert (stats["models_compiled"], stats["compile_seconds"] > 0) == (int(is_compiled), is_compiled)
    with pytest.raises(InputError, match="compile_timeout_s is a positive number of seconds; found -1"):
        serving.create_integrated_compiler(max_compilation_time=-1)
