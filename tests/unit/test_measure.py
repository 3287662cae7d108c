from __future__ import annotations

import gc
import math
import random
import sys
import time
from collections import Counter

import pytest
from tests.fake_clock import FakeClock

from pytest_cudagraph.compile import time_limit
from pytest_cudagraph.errors import CudagraphError
from pytest_cudagraph.measure import Arms, Bounds, PerfCounterClock, measure_arms, timer
from pytest_cudagraph.measure.sampling import block_size
from pytest_cudagraph.protocols import Clock
from pytest_cudagraph.stats import EvidenceRule, FixedTimeRule, summaries

US, MS, S = 1e3, 1e6, 1e9


class Arm:
    """A call that takes time on the fake clock: ``cost_ns`` is a number or a function of the call's number."""

    def __init__(self, clock, cost_ns, log=None, letter=""):
        self.clock, self.cost_ns, self.log, self.letter = clock, cost_ns, log, letter
        self.calls = 0

    def __call__(self):
        cost_ns = self.cost_ns(self.calls) if callable(self.cost_ns) else self.cost_ns
        self.calls += 1
        self.clock.time_ns += cost_ns
        if self.log is not None:
            self.log.append(self.letter)


def noisy(base_ns, seed, scale=0.01):
    rng = random.Random(seed)

    def cost_ns(_):
        t3 = rng.gauss(0, 1) / math.sqrt(sum(rng.gauss(0, 1) ** 2 for _ in range(3)) / 3)
        return base_ns * math.exp(scale * t3)

    return cost_ns


def measured(eager, replay, *, clock, rule=None, bounds=None, seed=1, **options):
    """Time two callables, for an ``EvidenceRule`` of 1.15 within ten seconds unless told."""
    rule, bounds = rule or EvidenceRule(1.15), bounds or Bounds.of_budget(10 * S)
    return measure_arms(
        Arms(eager=eager, replay=replay, compiled=options.pop("compiled", None)),
        clock=clock, rule=rule, bounds=bounds, seed=seed, **options,
    )  # fmt: skip


def run(eager_ns, replay_ns, *, compiled_ns=None, budget_ns=10 * S, clock=None, bounds=None, **options):
    clock = clock or FakeClock()
    log: list[str] = []
    compiled = None if compiled_ns is None else Arm(clock, compiled_ns, log, "C")
    eager, replay = Arm(clock, eager_ns, log, "E"), Arm(clock, replay_ns, log, "R")
    bounds = bounds or Bounds.of_budget(budget_ns)
    return measured(eager, replay, clock=clock, compiled=compiled, bounds=bounds, **options), log, clock


# --- what comes out --------------------------------------------------------------------------------------------------


def test_a_clear_gain_passes_with_all_its_figures():
    timing, _, clock = run(120 * US, 100 * US)
    assert timing.decision == "pass"
    assert timing.speedup.estimate == pytest.approx(1.2)
    assert timing.speedup.low == pytest.approx(1.2, rel=1e-4)
    assert (timing.eager.median_ns, timing.replay.median_ns) == (120 * US, 100 * US)
    assert timing.target_ratio == 1.15
    assert timing.seed == 1
    assert timing.inner_calls == 1
    assert timing.compiled is timing.device_replay is None
    assert timing.extended is False
    assert timing.notes == ()
    assert timing.blocks >= 10
    assert timing.eager.samples == timing.replay.samples == 4 * timing.blocks
    assert 0.25 * S <= timing.measure_ns <= 0.27 * S
    assert timing.measure_ns == clock.time_ns


@pytest.mark.slow
@pytest.mark.parametrize(("ratio", "wrong"), [(1.10, "fail"), (0.90, "pass")])
def test_heavy_tails_never_turn_ten_percent_into_the_wrong_verdict(ratio, wrong):
    found = Counter()
    for seed in range(25):
        eager, replay = noisy(1.15 * ratio * 200 * US, seed), noisy(200 * US, seed + 1000)
        found[run(eager, replay, seed=seed)[0].decision] += 1
    assert found[wrong] == 0
    assert found["open"] <= 1


def test_a_verdict_lies_in_its_interval():
    for seed in range(8):
        ratio = 1.15 * (1.02 if seed % 2 else 0.98)
        timing, _, _ = run(noisy(ratio * MS, seed, 0.02), noisy(MS, seed + 99, 0.02), seed=seed, budget_ns=4 * S)
        boundary = 1.15 * 0.995
        assert timing.decision in ("pass", "fail", "open")
        if timing.decision == "pass":
            assert timing.speedup.low >= boundary * (1 - 1e-12)
        if timing.decision == "fail":
            assert timing.speedup.high <= boundary * (1 + 1e-12)


class Waiting:
    """Arms that wait 20 ms for a CPU in some of their calls. ``cpu_time_ns`` goes on only while they work."""

    def __init__(self, *, waits):
        self.clock, self.cpu_ns, self.calls, self.waits = FakeClock(), 0.0, 0, waits

    def arm(self, work_ns):
        def call():
            self.calls += 1
            self.cpu_ns += work_ns
            self.clock.time_ns += work_ns + (20 * MS if self.waits(self.calls) else 0)

        return call

    def measured(self, **options):
        return measured(
            self.arm(180 * US), self.arm(100 * US), clock=self.clock, cpu_time_ns=lambda: int(self.cpu_ns), **options
        )


def test_calls_that_always_wait_for_a_cpu_are_not_judged_and_the_reason_is_told():
    timing = Waiting(waits=lambda call: True).measured()
    assert timing.decision == "open"
    assert timing.discarded > 0
    assert timing.disturbance == "the calls waited for a CPU most of the time"
    assert timing.notes[-1] == "no block is left: the figures are from the warm-up"


def test_without_the_cpu_time_such_waits_would_fail_a_fast_graph():
    waiting = Waiting(waits=lambda call: True)
    timing = measured(waiting.arm(180 * US), waiting.arm(100 * US), clock=waiting.clock)
    assert timing.decision == "fail"


def test_blocks_that_waited_are_left_out_and_the_others_decide():
    timing = Waiting(waits=lambda call: call // 64 % 2).measured()
    assert timing.decision == "pass"
    assert timing.speedup.estimate == pytest.approx(1.8)
    assert timing.discarded > 0


class Shaken:
    """Arms that are slowed in bursts, each in its own, some of the time: often no quiet state is to be found."""

    def __init__(self, seed):
        rng = random.Random(seed)
        self.clock, self.noise = FakeClock(50.0), random.Random(seed + 1)
        self.true_ratio = 1.15 * rng.choice([0.9, 0.97, 0.99, 0.994, 1, 1.01, 1.1])
        base_ns, self.sigma = rng.choice([200 * US, 2 * MS]), rng.choice([0.001, 0.01, 0.05])
        shares = [rng.choice([0, 0.2, 0.4, 0.5]) for _ in range(2)]
        factors = [rng.choice([1.05, 1.2, 1.5, 2]) for _ in range(2)]
        self.burst_ns = rng.choice([0.1 * MS, 5 * MS, 30 * MS])
        self.eager = self.arm(base_ns * self.true_ratio, shares[0], factors[0])
        self.replay = self.arm(base_ns, shares[1], factors[1])

    def arm(self, base_ns, share, factor):
        until_ns, is_slow = 0.0, False

        def call():
            nonlocal until_ns, is_slow
            if self.clock.time_ns >= until_ns:
                until_ns, is_slow = self.clock.time_ns + self.burst_ns, self.noise.random() < share
            self.clock.time_ns += round(base_ns * self.noise.lognormvariate(0, self.sigma) * (factor if is_slow else 1))

        return call

    def timing(self):
        return measured(self.eager, self.replay, clock=self.clock, bounds=Bounds.of_budget(3 * S))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(30), 147, 184, 192, 318])
def test_verdict_estimate_and_interval_agree_whatever_shakes_the_arms(seed):
    timing, boundary = Shaken(seed).timing(), 1.15 * 0.995
    shown = timing.speedup
    assert shown.low <= shown.estimate <= shown.high
    if timing.decision == "pass":
        assert boundary * (1 - 1e-12) <= shown.low
    if timing.decision == "fail":
        assert shown.high <= boundary * (1 + 1e-12)


def test_where_nothing_tells_the_quiet_blocks_it_is_told():
    # Slowed by half in seven of ten calls.
    timing, _, _ = run(lambda n: 230 * US * (1.5 if n % 200 < 140 else 1.0), 200 * US, budget_ns=S)
    assert timing.decision == "open"
    (note,) = timing.notes
    assert note == "only one arm was disturbed in most of the blocks: the figures include all blocks"
    assert timing.speedup.low <= timing.speedup.estimate <= timing.speedup.high


def test_the_interval_is_told_the_boundary_that_was_tested(monkeypatch):
    told = []
    interval = summaries.speedup_interval

    def spy(log_ratios, evidence, *, boundary_ratio, **options):
        told.append(boundary_ratio)
        return interval(log_ratios, evidence, boundary_ratio=boundary_ratio, **options)

    monkeypatch.setattr(summaries, "speedup_interval", spy)
    run(120 * US, 100 * US, rule=EvidenceRule(1.10, tolerance=0.01))
    run(120 * US, 100 * US, rule=FixedTimeRule(time_ns=0))
    assert told == [1.10 * 0.99, None]


def test_the_same_seed_gives_the_same_order_and_another_seed_another():
    logs = [run(120 * US, 100 * US, seed=seed)[1] for seed in (5, 5, 6)]
    assert logs[0] == logs[1] != logs[2]


def test_speed_that_is_not_judged_stays_open_and_without_a_target():
    timing, _, _ = run(120 * US, 100 * US, rule=FixedTimeRule(time_ns=0.1 * S))
    assert (timing.decision, timing.target_ratio, timing.extended) == ("open", None, False)
    assert 0.1 * S <= timing.measure_ns <= 0.12 * S


# --- order and noise -------------------------------------------------------------------------------------------------


def test_samples_come_in_randomised_mirrored_quads():
    _, log, _ = run(600 * US, 500 * US, rule=FixedTimeRule(time_ns=0.1 * S))
    timed = "".join(log[-(len(log) // 4 // 2 * 4) :])
    quads = Counter(timed[i : i + 4] for i in range(0, len(timed), 4))
    assert set(quads) == {"ERRE", "REER"}
    assert min(quads.values()) > 0.25 * sum(quads.values())


def test_a_cost_on_every_fourth_call_hits_both_arms():
    found = Counter()
    for seed in range(20):
        clock = FakeClock()
        calls = {"n": 0}

        def costly(base_ns, calls=calls):
            def cost_ns(_):
                calls["n"] += 1
                return base_ns * (1.3 if calls["n"] % 4 == 0 else 1.0)

            return cost_ns

        timing, _, _ = run(costly(1.15 * 1.05 * 200 * US), costly(200 * US), seed=seed, clock=clock)
        found[timing.decision] += 1
    assert found["fail"] == 0
    assert found["pass"] >= 18


def test_drift_is_cancelled_by_pairing_and_told():
    clock = FakeClock()
    eager = Arm(clock, lambda _: 1.25 * MS * (1 + clock.time_ns / S))
    replay = Arm(clock, lambda _: MS * (1 + clock.time_ns / S))
    timing = measured(eager, replay, clock=clock, seed=3)
    assert timing.decision == "pass"
    assert timing.speedup.estimate == pytest.approx(1.25, rel=0.01)
    assert timing.drift_ratio > 1.10
    (note,) = timing.notes
    assert note == "eager became 18 % slower during the measurement; the pairing of samples cancels that"


def test_a_device_that_speeds_up_is_told_too():
    clock = FakeClock()
    eager = Arm(clock, lambda _: 1.25 * MS * (1.3 if clock.time_ns < 0.2 * S else 1.0))
    replay = Arm(clock, lambda _: MS * (1.3 if clock.time_ns < 0.2 * S else 1.0))
    timing = measured(eager, replay, clock=clock, seed=3)
    assert timing.drift_ratio < 1 / 1.10
    assert "faster during the measurement" in timing.notes[0]


def test_bursts_on_both_arms_do_not_move_the_verdict():
    found = Counter()
    for seed in range(15):
        clock = FakeClock()

        def burst(base_ns, clock=clock):
            return lambda _: base_ns * (1.5 if clock.time_ns % (50 * MS) < 15 * MS else 1.0)

        found[run(burst(1.15 * 0.95 * 200 * US), burst(200 * US), seed=seed, clock=clock)[0].decision] += 1
    assert found["pass"] == 0
    assert found["fail"] >= 14


# --- the timed interval ----------------------------------------------------------------------------------------------


def test_a_sample_waits_for_the_device_before_and_after():
    clock = FakeClock()
    events: list[str] = []
    pending = {"ns": 0.0}

    def launch(name, device_ns):
        def call():
            events.append(name)
            clock.time_ns += 5 * US  # the host's share
            pending["ns"] += device_ns

        return call

    def synchronize():
        events.append("sync")
        clock.time_ns += pending["ns"]
        pending["ns"] = 0.0

    timing = measured(launch("E", 195 * US), launch("R", 95 * US), clock=clock, synchronize=synchronize)
    assert (timing.eager.median_ns, timing.replay.median_ns) == (200 * US, 100 * US)
    assert [events[i : i + 3][0::2] for i in range(0, 30, 3)] == [["sync", "sync"]] * 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("resolution_ns", "cost_ns", "calls"),
    [(1.0, 0, 1), (50.0, 0, 10), (1.0, 50, 10), (500.0, 0, 100), (12_500.0, 0, 2500)],
)
def test_short_calls_are_repeated_until_the_clock_is_good_enough(resolution_ns, cost_ns, calls):
    clock = FakeClock(resolution_ns, cost_ns)
    timing, _, _ = run(1.5 * US, US, clock=clock)
    # A reading of the clock inside the interval counts with it, as it does in truth.
    assert timing.inner_calls == pytest.approx(calls, abs=1)
    assert timing.eager.median_ns == pytest.approx(1.5 * US, rel=0.006)
    assert timing.decision == "pass"


class SteppedClock(FakeClock):
    """Reads in steps of its resolution, as a coarse clock does."""

    def now_ns(self) -> int:
        return int(self.time_ns // self.resolution_ns * self.resolution_ns)


@pytest.mark.parametrize(("ratio", "decision"), [(1.2, "pass"), (1.1, "fail")])
def test_a_coarse_clock_gives_the_right_verdict_where_enough_calls_fit(ratio, decision):
    timing, _, clock = run(ratio * 2 * US, 2 * US, clock=SteppedClock(25 * US), budget_ns=2 * S)
    assert (timing.decision, timing.notes) == (decision, ())
    assert timing.inner_calls == pytest.approx(2500, rel=0.01)
    assert timing.speedup.estimate == pytest.approx(ratio, rel=0.01)
    assert clock.time_ns <= 2 * S


def test_a_clock_too_coarse_for_its_calls_gives_no_verdict_and_is_named():
    timing, _, clock = run(2.2 * US, 2 * US, clock=SteppedClock(MS), budget_ns=0.5 * S, rule=EvidenceRule(1.05))
    assert (timing.decision, timing.target_ratio) == ("open", 1.05)
    (note,) = timing.notes
    assert note == (
        "a clock of 1.0 ms is too coarse for calls of 2.0 µs: samples of 100000 calls do not fit into the time "
        "budget of 0.5 s"
    )
    assert timing.speedup.low < 1.05 < 1.1 < timing.speedup.high
    assert clock.time_ns <= 0.5 * S


def test_a_clock_too_coarse_for_the_most_calls_there_can_be_gives_no_verdict(monkeypatch):
    monkeypatch.setattr(timer, "_MAX_INNER_CALLS", 1000)
    timing, _, _ = run(0.0, 0.0, clock=FakeClock(1.0, 1), budget_ns=4 * US)
    (note,) = timing.notes
    assert note == "a clock of 1.0 ns is too coarse for calls of at most 0.0 ns: so are 1000 in a row"
    assert timing.decision == "open"


def test_a_clock_too_coarse_for_single_calls_gives_no_verdict_where_a_state_is_brought_back():
    timing, _, _ = run(22 * US, 20 * US, clock=FakeClock(2 * US), rule=EvidenceRule(1.05), prepare=lambda: None)
    assert (timing.decision, timing.inner_calls) == ("open", 1)
    (note,) = timing.notes
    assert note == "a clock of 2.0 µs is too coarse for calls of 20.0 µs: their state is restored before each"
    # Each sample may be off by 2 µs.
    assert (timing.speedup.low, timing.speedup.high) == pytest.approx((20 / 22, 24 / 18), rel=1e-4)
    timing, _, _ = run(220 * US, 200 * US, clock=FakeClock(MS / 1000), rule=EvidenceRule(1.05), prepare=lambda: None)
    assert (timing.decision, timing.notes) == ("pass", ())


def test_speed_that_is_not_judged_keeps_its_time_with_a_clock_that_is_too_coarse():
    rule = FixedTimeRule(time_ns=0.1 * S)
    timing, _, clock = run(22 * US, 20 * US, clock=FakeClock(2 * US), rule=rule, prepare=lambda: None)
    assert "too coarse" in timing.notes[0]
    assert 0.1 * S <= clock.time_ns <= 0.12 * S


def test_calls_that_the_clock_cannot_see_still_give_a_result(monkeypatch):
    monkeypatch.setattr(timer, "_MAX_INNER_CALLS", 1000)
    timing, _, _ = run(0.0, 0.0, clock=FakeClock(1.0, 1), budget_ns=4 * US)
    assert timing.decision == "open"
    assert timing.speedup.estimate == 1.0


@pytest.mark.parametrize(
    ("pair_ns", "samples"),
    [
        (1 * US, 32),
        (20 * US, 32),
        (37 * US, 28),
        (100 * US, 10),
        (400 * US, 4),
        (MS, 4),
        (2 * MS, 4),
        (2.1 * MS, 2),
        (100 * MS, 2),
    ],
)
def test_a_block_is_about_a_millisecond_of_pairs(pair_ns, samples):
    assert block_size(pair_ns) == samples


def test_a_block_keeps_the_lower_quartile_of_each_arm():
    class Spy(FixedTimeRule):
        def __init__(self):
            super().__init__(time_ns=0.05 * S)
            self.blocks = []

        def add(self, block):
            super().add(block)
            self.blocks.append(block)

    rule = Spy()
    # One call in three is ten times as slow: means and maxima would show it, quartiles do not.
    run(lambda n: 60 * US * (10 if n % 3 == 0 else 1), lambda n: 40 * US, rule=rule)
    assert {block.eager_ns for block in rule.blocks} == {60 * US}


def test_the_latencies_beside_a_speedup_divide_to_it():
    """In a third of the blocks eager alone is ten times as slow, and such blocks are not judged."""
    quiet = noisy(120 * US, 1)
    timing, _, _ = run(lambda n: quiet(n) * (10 if n % 300 < 100 else 1), noisy(100 * US, 2), compiled_ns=90 * US)
    eager_ns, replay_ns = timing.medians.eager_ns, timing.medians.replay_ns
    assert eager_ns / replay_ns == pytest.approx(timing.speedup.estimate, rel=1e-9)
    assert (eager_ns, timing.medians.compiled_ns) == (pytest.approx(120 * US, rel=0.02), 90 * US)
    assert timing.eager.median_ns > 1.01 * eager_ns


# --- warm-up ---------------------------------------------------------------------------------------------------------


def test_cold_first_calls_are_not_measured():
    timing, _, _ = run(lambda n: 120 * US * (60 if n == 0 else 1), lambda n: 100 * US * (60 if n == 0 else 1))
    assert timing.decision == "pass"
    assert timing.speedup.estimate == pytest.approx(1.2)
    assert timing.eager.samples == 4 * timing.blocks


def test_an_arm_that_settles_over_forty_calls_is_waited_for():
    timing, _, _ = run(lambda n: 100 * US * (1 + 2 * max(0, 40 - n) / 40), 100 * US)
    assert timing.decision == "fail"
    assert timing.eager.q90_ns == 100 * US


def test_steady_arms_are_warm_after_four_windows():
    _, log, _ = run(MS, MS, rule=FixedTimeRule(time_ns=0, min_blocks=1))
    # The cold call and the second of each arm, a window of five, three that gain nothing, one block of four.
    assert log[:4] == ["E", "R", "E", "R"]
    assert log.count("E") == log.count("R") == 2 + 4 * 5 + 4


def test_noise_without_direction_does_not_prolong_the_warm_up():
    # Windows of 1.1 ms and of 1.0 ms in turn: the second is the last that gains.
    _, log, _ = run(
        lambda n: (1.1 if (n - 2) // 5 % 2 == 0 else 1.0) * 0.5 * MS,
        0.5 * MS,
        rule=FixedTimeRule(time_ns=0, min_blocks=1),
    )
    assert log.count("R") == 2 + 5 * 5 + 4


def test_slow_settling_counts_in_all():
    # Each window gains 0.3 %, below the limit for one, until forty calls are over.
    timing, _, _ = run(lambda n: 100 * US * (1 + 0.0006 * max(0, 42 - n)), 100 * US)
    assert timing.eager.q90_ns == 100 * US
    assert timing.eager.minimum_ns == 100 * US


def test_warm_up_takes_a_fifth_of_the_hard_bound_at_most():
    begun: list[float] = []

    class Spy(FixedTimeRule):
        def add(self, block):
            begun.append(clock.time_ns)
            super().add(block)

    clock = FakeClock()

    # Never settled: every call is faster than the one before.
    def settling(n):
        return 11 * MS * 0.995**n

    run(settling, settling, rule=Spy(time_ns=0), clock=clock, budget_ns=8 * S)
    assert 1.5 * S <= begun[0] <= 0.2 * 8 * S + 8 * 11 * MS


# --- bounds ----------------------------------------------------------------------------------------------------------


def test_an_open_measurement_is_extended_once_and_then_given_up():
    at_boundary = 1.15 * 0.995
    timing, _, clock = run(noisy(at_boundary * 2 * MS, 1, 0.05), noisy(2 * MS, 2, 0.05), budget_ns=2 * S)
    assert timing.decision == "open"
    assert timing.extended is True
    assert 1.9 * S < clock.time_ns <= 2 * S


def test_a_decided_measurement_is_not_extended():
    timing, _, clock = run(noisy(2.0 * MS, 1), noisy(MS, 2), budget_ns=4 * S)
    assert timing.extended is False
    assert clock.time_ns < S


def test_without_an_extension_the_first_bound_is_the_last():
    bounds = Bounds(first_ns=S, extended_ns=S)
    timing, _, clock = run(1.15 * 0.995 * MS, MS, bounds=bounds)
    assert timing.extended is False
    assert clock.time_ns <= S


@pytest.mark.parametrize("call_s", [0.05, 0.2, 0.7, 1.0, 1.2, 2.0, 3.0, 4.9])
def test_the_bound_is_kept_with_slow_calls_and_a_result_still_comes(call_s):
    timing, _, clock = run(call_s * S, call_s * S, budget_ns=10 * S)
    assert clock.time_ns <= 10 * S
    assert timing.measure_ns == clock.time_ns
    assert timing.decision == ("fail" if call_s == 0.05 else "open")
    assert timing.speedup.estimate == 1.0
    assert timing.blocks >= 1


@pytest.mark.parametrize(
    ("eager_ns", "replay_ns", "budget_ns"),
    [
        (10 * MS, 10.0, S),
        (0.5 * S, US, 2 * S),
        (50 * MS, 100.0, 2 * S),
        (0.1 * S, 10.0, 10 * S),
        (10.0, 50 * MS, 2 * S),
    ],
)
def test_the_bound_is_kept_where_one_arm_is_far_shorter_than_the_other(eager_ns, replay_ns, budget_ns):
    timing, _, clock = run(eager_ns, replay_ns, clock=FakeClock(50.0), budget_ns=budget_ns)
    assert clock.time_ns <= budget_ns
    assert timing.decision == "open"
    assert timing.notes[-1].startswith("a clock of 50.0 ns is too coarse for calls of ")
    assert timing.speedup.low <= eager_ns / replay_ns <= timing.speedup.high


def test_short_replays_of_a_long_eager_are_judged_where_their_samples_fit():
    timing, _, clock = run(10 * MS, US, clock=FakeClock(50.0))
    assert (timing.decision, timing.notes) == ("pass", ())
    assert timing.inner_calls == 10
    assert clock.time_ns <= 10 * S


def test_bringing_back_a_state_counts_towards_the_bound():
    clock = FakeClock()

    def prepare():
        clock.time_ns += 0.2 * S

    timing, _, _ = run(MS, MS, clock=clock, budget_ns=S, prepare=prepare)
    assert clock.time_ns <= S
    assert (timing.decision, timing.blocks) == ("open", 1)


def test_calls_too_slow_for_a_single_quad_are_reported_from_the_warm_up():
    timing, log, clock = run(3 * S, 3 * S, budget_ns=10 * S)
    assert log == ["E", "R", "E"]
    assert clock.time_ns == 9 * S
    assert (timing.blocks, timing.decision) == (1, "open")
    assert (timing.speedup.low, timing.speedup.high) == (0.0, math.inf)
    assert timing.detectable_ratio == math.inf
    assert timing.notes == (
        "the time budget of 10.0 s was too short for timed samples: the figures are from the warm-up",
    )


def test_one_block_is_a_result_and_stays_open():
    timing, _, clock = run(1.0 * S, 1.0 * S, budget_ns=8 * S)
    assert (timing.blocks, timing.decision, timing.extended) == (1, "open", True)
    assert timing.notes == ()
    assert clock.time_ns == 8 * S


def test_a_block_cut_by_the_bound_counts_when_it_is_the_only_one():
    bounds = Bounds(first_ns=15 * MS, extended_ns=15 * MS)
    timing, _, clock = run(MS, MS, bounds=bounds)
    # Warm-up 5 ms, a quad 4 ms: the two quads of a block do fit, a second block does not.
    assert clock.time_ns <= 15 * MS
    assert (timing.blocks, timing.eager.samples) == (1, 4)
    bounds = Bounds(first_ns=10 * MS, extended_ns=10 * MS)
    timing, _, clock = run(MS, MS, bounds=bounds)
    assert clock.time_ns <= 10 * MS
    assert (timing.blocks, timing.eager.samples, timing.notes) == (1, 2, ())


def test_blocks_of_a_disturbed_device_are_thrown_away_and_others_taken():
    # Throttled for the first 0.5 s: both arms take twice as long, and eager thrice.
    clock = FakeClock()

    def disturbance():
        return "GPU 0 held its clocks down (power cap)" if clock.time_ns < S / 2 else ""

    def slow(normal_ns, factor):
        return lambda n: normal_ns * (factor if clock.time_ns < S / 2 else 1)

    timing, _, _ = run(
        slow(120 * US, 3), slow(100 * US, 2), clock=clock, rule=EvidenceRule(1.1), disturbance=disturbance
    )
    assert timing.decision == "pass"
    assert timing.speedup.estimate == pytest.approx(1.2)
    assert timing.eager.median_ns == pytest.approx(120 * US)
    assert timing.discarded > 0
    assert timing.notes[0] == (
        f"{timing.discarded} blocks discarded, {timing.blocks} kept: GPU 0 held its clocks down (power cap)"
    )


def test_a_device_that_stays_disturbed_decides_nothing_and_says_why():
    bounds = Bounds(first_ns=S / 4, extended_ns=S)
    timing, _, _ = run(
        130 * US, 100 * US, rule=EvidenceRule(1.2), bounds=bounds, disturbance=lambda: "GPU 0 was shared"
    )
    assert (timing.decision, timing.disturbance) == ("open", "GPU 0 was shared")
    assert timing.discarded > 100


def test_the_device_is_asked_after_between_blocks_and_not_at_each():
    asked = []
    timing, _, clock = run(130 * US, 100 * US, rule=EvidenceRule(1.2), disturbance=lambda: asked.append(1) or "")
    assert timing.decision == "pass"
    assert timing.discarded == 0
    assert 2 <= len(asked) <= 2 + clock.time_ns / (50 * MS)


def test_a_measurement_collects_no_garbage(monkeypatch):
    monkeypatch.setattr(gc, "collect", lambda: pytest.fail("a collection takes a tenth of a second"))
    assert run(120 * US, 100 * US)[0].blocks > 0


def test_blocks_of_one_disturbed_arm_do_not_count_and_it_is_told():
    # Eager is slowed by half for 60 of every 200 calls.
    timing, _, _ = run(lambda n: 230 * US * (1.5 if n % 200 < 60 else 1.0), 200 * US, rule=EvidenceRule(1.2))
    assert timing.decision == "fail"
    assert timing.speedup.estimate == pytest.approx(1.15)
    assert timing.speedup.high < 1.2
    (note,) = timing.notes
    assert note == "only one arm was disturbed in 27 % of the blocks, which are excluded"


def test_a_call_that_suddenly_takes_forever_ends_the_measurement():
    def cost_ns(n):
        return 30 * S if n == 200 else 10 * MS

    timing, log, clock = run(cost_ns, lambda n: 10 * MS, rule=FixedTimeRule(time_ns=9 * S))
    assert log.count("E") <= 203, "at most the rest of the quad that could not be interrupted"
    assert timing.decision == "open"
    assert clock.time_ns < 30 * S + 10 * S


@pytest.mark.parametrize(("first_ns", "extended_ns"), [(0, 1), (2, 1), (-1, 1)])
def test_bounds_out_of_order_are_refused(first_ns, extended_ns):
    with pytest.raises(ValueError, match="0 < first <= extended"):
        Bounds(first_ns=first_ns, extended_ns=extended_ns)


def test_a_time_budget_is_a_quarter_first():
    assert Bounds.of_budget(10 * S) == Bounds(first_ns=2.5 * S, extended_ns=10 * S)


# --- the arms that are only shown ------------------------------------------------------------------------------------


def test_a_compiled_arm_is_sampled_in_every_block_and_never_judged():
    timing, log, _ = run(120 * US, 100 * US, compiled_ns=5 * MS)
    assert timing.compiled.median_ns == 5 * MS
    assert timing.compiled.samples == 2 * timing.blocks
    assert timing.decision == "pass"
    assert timing.eager.samples == 4 * timing.blocks
    quads = "".join(log[log.index("C") :]).replace("C", "|")
    assert "ERRE" in quads
    assert "REER" in quads


def test_a_compiled_arm_stands_at_random_places():
    _, log, _ = run(120 * US, 100 * US, compiled_ns=110 * US, rule=FixedTimeRule(time_ns=0.1 * S))
    places = {i % 10 for i, letter in enumerate(log[-500:]) if letter == "C"}
    assert len(places) >= 4


def test_a_compiled_arm_that_does_not_fit_does_not_end_the_measurement():
    timing, _, clock = run(120 * US, 100 * US, compiled_ns=4.5 * S, budget_ns=10 * S)
    assert clock.time_ns <= 10 * S
    assert timing.decision == "pass"
    assert timing.compiled.median_ns == 4.5 * S


def test_device_events_read_the_replay_after_the_measurement():
    clock = FakeClock()

    class Events:
        def time_ns(self, call):
            call()
            return 80 * US

    timing, log, _ = run(120 * US, 100 * US, clock=clock, event_timer=Events())
    assert timing.device_replay.median_ns == 80 * US
    assert timing.device_replay.samples == 7
    assert log[-7:] == ["R"] * 7


def test_device_events_keep_the_bound():
    class Events:
        def time_ns(self, call):
            call()
            return S

    timing, _, clock = run(S, S, budget_ns=8 * S, event_timer=Events())
    assert timing.device_replay is None
    assert clock.time_ns <= 8 * S


def test_progress_is_told_between_blocks():
    told: list[tuple[float, float]] = []
    timing, _, _ = run(120 * US, 100 * US, progress=lambda *figures: told.append(figures))
    assert len(told) == timing.blocks - 1
    assert all(bound_ns == 10 * S for _, bound_ns in told)
    assert [elapsed_ns for elapsed_ns, _ in told] == sorted(elapsed_ns for elapsed_ns, _ in told)


# --- the process around it -------------------------------------------------------------------------------------------


@pytest.fixture
def collector():
    """The collector's state, put back whatever a test does with it."""
    was_enabled = gc.isenabled()
    yield gc
    (gc.enable if was_enabled else gc.disable)()


def test_the_collector_rests_while_timing_and_runs_again_after(collector):
    collector.enable()
    seen = set()
    clock = FakeClock()

    def call():
        seen.add(collector.isenabled())
        clock.time_ns += MS

    measured(call, call, clock=clock, rule=FixedTimeRule(time_ns=0))
    assert seen == {False}
    assert collector.isenabled()


def test_a_collector_that_was_off_stays_off(collector):
    collector.disable()
    run(MS, MS, rule=FixedTimeRule(time_ns=0))
    assert not collector.isenabled()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("call_number", [0, 100])
def test_what_an_arm_raises_passes_and_the_collector_is_back(collector, error, call_number):
    collector.enable()

    def cost_ns(n):
        if n == call_number:
            raise error
        return MS

    with pytest.raises(error):
        run(cost_ns, lambda n: MS, rule=FixedTimeRule(time_ns=S))
    assert collector.isenabled()


def test_the_performance_counter_is_a_clock_of_nanoseconds():
    clock = PerfCounterClock()
    assert isinstance(clock, Clock)
    assert 0 < clock.resolution_ns <= 1e6
    before, now, after = time.perf_counter_ns(), clock.now_ns(), time.perf_counter_ns()
    assert before <= now <= after


def test_real_time_gives_a_result():
    timing = measured(
        lambda: sum(range(600)),
        lambda: sum(range(200)),
        clock=PerfCounterClock(),
        rule=EvidenceRule(1.15, min_time_ns=0.01 * S),
        bounds=Bounds.of_budget(2 * S),
    )
    assert timing.decision == "pass"
    assert timing.inner_calls > 1


@pytest.fixture
def frozen_time(monkeypatch):
    """As freezegun does it: every name of every module that is a clock of :mod:`time` becomes one that stands."""
    real = [time.perf_counter_ns, time.perf_counter, time.monotonic, time.monotonic_ns]
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()):
            if any(value is each for each in real):
                monkeypatch.setattr(module, name, lambda: 0)


def test_frozen_time_stops_neither_the_bound_of_a_measurement_nor_of_a_compile(frozen_time):
    clock, deadline = PerfCounterClock(), time_limit.Deadline(60.0)
    assert time.perf_counter_ns() == time.monotonic() == 0
    before_ns = clock.now_ns()
    while clock.now_ns() == before_ns:
        pass
    while deadline.remaining_s == 60.0:
        pass


def test_a_clock_that_stands_still_is_an_error_by_name(monkeypatch):
    monkeypatch.setattr(timer, "_STOPPED_CALLS", 1000)
    with pytest.raises(CudagraphError) as raised:
        run(0.0, 0.0)
    assert str(raised.value) == (
        "a measurement needs a clock that advances; FakeClock stood still for 1000 calls: something replaced "
        "time.perf_counter_ns before this plugin was loaded (freezegun, a mock); measure outside of it"
    )
