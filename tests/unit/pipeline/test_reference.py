"""The reference workload is the same whatever a test sets, and never costs a measurement much."""

from __future__ import annotations

import torch
from tests.fake_clock import FakeClock

from pytest_cudagraph.backends.cpu import CpuBackend
from pytest_cudagraph.errors import CaptureRefusal
from pytest_cudagraph.measure import PerfCounterClock
from pytest_cudagraph.pipeline.device_context import Readings, Reference, reference_workload


def clock():
    """Every look at it takes a tenth of a millisecond."""
    return FakeClock(cost_ns=100_000)


def reference():
    return Reference(CpuBackend(), clock())


def test_it_takes_a_tenth_of_the_time_and_not_all_at_once():
    found = reference().readings()
    found.keep_up(5_000_000)
    assert found.latency() is None  # six readings: too few
    found.keep_up(10_000_000)
    assert found.latency().samples == 11
    found.keep_up(1e12)
    assert found.latency().samples == 11 + 16


def test_a_reading_is_one_replay_between_two_looks_at_the_clock():
    found = reference().readings()
    found.keep_up(1e12)
    assert (found.latency().median_ns, found.latency().q25_ns) == (100_000, 100_000)


def test_an_interruption_is_not_the_references_own_time():
    samples = iter([100_000.0, 40e6, *[100_000.0] * 40])
    found = Readings(lambda: next(samples))
    found.keep_up(12_000_000)
    assert found.latency().samples == 10  # 1.3 of 1.2 ms spent, 0.4 of them for the interrupted one


class Counts(CpuBackend):
    asked = 0

    def pool(self):
        self.asked += 1
        return super().pool()


def test_it_is_captured_once():
    backend = Counts()
    found = Reference(backend, clock())
    found.readings()
    found.readings()
    assert backend.asked == 1


class Refuses(CpuBackend):
    asked = 0

    def pool(self):
        self.asked += 1
        raise CaptureRefusal("no", hazard="unknown-op")


def test_where_it_cannot_be_captured_there_is_none():
    backend = Refuses()
    subject = Reference(backend, clock())
    for _ in range(2):
        found = subject.readings()
        found.keep_up(1e12)
        assert found.latency() is None
    assert backend.asked == 1


def test_it_draws_no_random_number_and_heeds_no_default():
    before, dtype = torch.get_rng_state(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"), torch.autocast("cpu"):
            found = Reference(CpuBackend(), PerfCounterClock()).readings()
        found.keep_up(1e12)
    finally:
        torch.set_default_dtype(dtype)
    assert found.latency().samples == 16
    assert torch.equal(before, torch.get_rng_state())


def test_its_numbers_stay_of_the_order_of_one():
    # Denormal numbers and infinities take their own time.
    values = torch.linspace(-1.0, 1.0, 32 * 32, dtype=torch.float64).reshape(32, 32)
    found = reference_workload(values)
    assert torch.isfinite(found).all()
    assert 0.1 < found.abs().mean() < 10
