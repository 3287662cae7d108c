"""The reference workload on a GPU: a graph of fifty kernels, read between blocks, that nobody notices."""

from __future__ import annotations

import pytest
import torch

from pytest_cudagraph.measure import PerfCounterClock
from pytest_cudagraph.pipeline.device_context import Reference
from pytest_cudagraph.units import to_ns


def read(reference):
    readings = reference.readings()
    for _ in range(2):  # 16 readings each, at most
        readings.keep_up(to_ns(600))
    return readings.latency()


def test_it_is_captured_and_read(backend):
    found = read(Reference(backend, PerfCounterClock()))
    assert found is not None, "its capture was refused"
    assert found.samples >= 10
    assert 0 < found.q25_ns <= found.median_ns


@pytest.mark.needs_speed("it compares latencies")
def test_it_is_captured_again_by_every_run_and_reads_alike(backend):
    clock = PerfCounterClock()
    first, second = read(Reference(backend, clock)), read(Reference(backend, clock))
    assert first.median_ns < 5e6
    assert 0.5 < first.q25_ns / second.q25_ns < 2, (first, second)


def test_generators_settings_and_autocast_are_left_as_they_were(backend):
    drawn, precision = torch.cuda.get_rng_state(), torch.get_float32_matmul_precision()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert read(Reference(backend, PerfCounterClock())) is not None
        assert torch.is_autocast_enabled("cuda")
    assert torch.equal(torch.cuda.get_rng_state(), drawn)
    assert torch.get_float32_matmul_precision() == precision
    assert not torch.is_inference_mode_enabled()
