"""The clocks: what they read on a GPU, and that a measurement decides."""

from __future__ import annotations

import statistics

import pytest
import torch
from tests.gpu.small_models import Mlp

from pytest_cudagraph import measure, stats
from pytest_cudagraph.measure import PerfCounterClock
from pytest_cudagraph.measure.timer import Bounds, Timer
from pytest_cudagraph.units import to_ns

pytestmark = pytest.mark.needs_speed("it measures the GPU's time")

_TRIES = 3
"""A clock that ramps up in the middle of a try moves one reading and not the other."""


def test_event_and_host_clocks_agree_on_work_that_the_device_bounds(backend):
    with backend.running():
        square = torch.randn(8192, 8192, device=backend.device, dtype=torch.bfloat16)

        def work():
            for _ in range(8):
                torch.mm(square, square)

        timer = Timer(
            calls={"replay": work},
            clock=PerfCounterClock(),
            synchronize=backend.synchronize,
            bounds=Bounds.of_budget(to_ns(60)),
        )
        events = backend.event_timer()
        ratios = []
        for _ in range(_TRIES):
            for _ in range(5):
                work()
            backend.synchronize()
            pairs = [(events.time_ns(work), timer.sample_ns("replay")) for _ in range(15)]
            device_ns, host_ns = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratios.append(host_ns / device_ns)
            if 0.95 <= ratios[-1] <= 1.05:
                return
    raise AssertionError(f"host over event time: {ratios}")


def timed(backend, graph, model, x, *, target, budget_s=8.0):
    with backend.running():
        return measure.measure_arms(
            measure.Arms(eager=lambda: model(x), replay=lambda: graph(x)),
            clock=PerfCounterClock(),
            rule=stats.EvidenceRule(target),
            bounds=Bounds.of_budget(to_ns(budget_s)),
            seed=1,
            synchronize=backend.synchronize,
            event_timer=backend.event_timer(),
        )


def test_a_launch_bound_model_is_faster_as_a_graph_and_the_gate_says_so(backend, capture):
    model, x = Mlp(depth=16).cuda().eval(), torch.randn(1, 64, device=backend.device)
    timing = timed(backend, capture(model, x), model, x, target=1.15)
    assert timing.decision == "pass", timing
    assert timing.speedup.low > 1.15
    assert timing.device_replay is not None
    # The device cannot have been at it for longer than the host waited, but for the events' own resolution.
    assert timing.device_replay.median_ns < timing.replay.median_ns + 5_000


def test_a_target_out_of_reach_fails(backend, capture):
    model, x = Mlp(depth=16).cuda().eval(), torch.randn(1, 64, device=backend.device)
    timing = timed(backend, capture(model, x), model, x, target=500.0)
    assert timing.decision == "fail", timing


def test_a_measurement_keeps_its_bound(backend, capture):
    model, x = Mlp(depth=16).cuda().eval(), torch.randn(1, 64, device=backend.device)
    timing = timed(backend, capture(model, x), model, x, target=1.15, budget_s=1.0)
    assert timing.measure_ns < to_ns(1.2)
