"""Models whose calls take long: the time that is told, and the calls that are left out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.fake_clock import FakeClock
from tests.unit.pipeline.test_model_run import Mlp, context_of, measure_once, run_of

from pytest_cudagraph import pipeline


class Slow(Mlp):
    """Each call takes a time on the fake clock."""

    def __init__(self, clock, seconds):
        super().__init__()
        self.spend = lambda: setattr(clock, "time_ns", clock.time_ns + seconds * 1e9)

    def forward(self, x):
        self.spend()
        return super().forward(x)


@pytest.mark.parametrize(
    ("seconds", "why", "told"),
    [
        (0.04, "rehearsal", ""),
        (0.5, "rehearsal", "15.0 s"),
        (0.8, "rehearsal", "24.0 s"),
        (0.65, "", "21.5 s"),  # with a budget of 1 s for each size
    ],
)
def test_the_time_of_slow_calls_is_told_before_it_is_spent(seconds, why, told):
    clock, lines = FakeClock(), []
    model = Slow(clock, seconds).eval()
    with replace(run_of(model, context_of(clock=clock, why_not_judged=why)), progress=lines.append) as run:
        run.run(run.run_eager)
        notes = run.finish().notes
    text = f"the whole test takes some {told}, beside compiling"
    assert lines == ([f"test_a: {text}"] if told else [])
    is_long = told in ("24.0 s", "21.5 s")
    assert notes == ((f"eager calls take up to {seconds:.1f} s: {text}",) if is_long else ())


def test_larger_sizes_of_a_slow_model_are_timed_briefly_where_speed_is_not_judged():
    clock = FakeClock()
    device_context = context_of(clock=clock, measure=measure_once, why_not_judged="rehearsal")
    with run_of(Slow(clock, 0.06).eval(), device_context) as run:
        report = pipeline.run_stages(run)
    assert report.at(1).timing.busy_ns is not None
    assert report.at(2).timing.busy_ns is None
    assert "the operations are not timed alone" in report.at(2).timing.notes[-1]
