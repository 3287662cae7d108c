from __future__ import annotations

import math
from dataclasses import replace

import pytest
from tests import facts

from pytest_cudagraph import gate
from pytest_cudagraph.baseline import figure_changes, latency_change, session_of
from pytest_cudagraph.errors import CaptureRefusal, CudagraphError
from pytest_cudagraph.gate import judge_agreement, judge_capture, refused
from pytest_cudagraph.values import (
    Agreement,
    DeviceInfo,
    Disagreement,
    Finding,
    Interval,
    Judgement,
    Latency,
    MeasuredBatch,
    Medians,
    NoBaseline,
    Receipt,
    SavedBatch,
    Site,
    Timing,
    UndecidedState,
    Verdict,
)

US = 1e3

H200 = DeviceInfo(
    kind="cuda", name="NVIDIA H200", driver="580.159", cuda="13.0", torch="2.13.0", python="3.12.4",
    host_cpu="AMD EPYC 9654", platform="Linux-6.8-x86_64", threads=16,
)  # fmt: skip
T4 = replace(H200, name="Tesla T4")
TWIN = replace(H200, kind="cpu", name="AMD EPYC 9654", driver=None, cuda=None)

NEW = NoBaseline(comparison="new", reason="no baseline holds test_mlp at batch 8 yet")
ASKED_FOR = replace(NEW, asked_for=True)
OFF = NoBaseline(comparison="off", reason="no baseline was wanted")
OTHER = NoBaseline(comparison="not-comparable", reason="the baseline is of Tesla T4, this run is on NVIDIA H200")


def latency(median_us: float, q25_us: float | None = None) -> Latency:
    q25_ns = (median_us if q25_us is None else q25_us) * US
    return Latency(
        samples=200,
        minimum_ns=q25_ns,
        q25_ns=q25_ns,
        median_ns=median_us * US,
        q75_ns=median_us * US,
        q90_ns=median_us * US,
    )


def test_nobody_is_asked_to_accept_less_than_was_asked_for():
    undecided = speedup(timed(1.30, 1.35, 1.40, "open"), 1.15)
    assert undecided.verdict is Verdict.INCONCLUSIVE
    assert (undecided.remedy, undecided.accept) == ("to decide: a larger --cudagraph-time-budget", None)


def timed(low: float, estimate: float, high: float, decision: str, *, target: float | None = 1.15, **changes) -> Timing:
    facts = {
        "eager": latency(120.0), "replay": latency(112.1), "medians": Medians(eager_ns=120_000.0, replay_ns=112_100.0),
        "speedup": Interval(estimate=estimate, low=low, high=high),
        "decision": decision, "target_ratio": target, "blocks": 34, "noise_ratio": 0.004, "detectable_ratio": 0.008,
        "measure_ns": 900_000_000, "seed": 7,
    }  # fmt: skip
    return Timing(**facts | changes)


def saved(eager_us=151.2, replay_us=112.4, *, device=H200, kernels=46, names=None, replay=None) -> SavedBatch:
    saved_at, replay = "2026-11-01T00:00:00Z", replay or latency(replay_us)
    return SavedBatch(
        name="test_mlp", batch_size=8, eager=latency(eager_us), replay=replay, compiled=None,
        speedup=Interval(estimate=1.35, low=1.33, high=1.37), kernels=kernels,
        kernel_names={"aten.mul": 16, "aten.add": 30} if names is None else names, device=device,
        saved_at=saved_at, sessions=(facts.one_session(replay, device, saved_at),),
    )  # fmt: skip


def receipt(kernels: int | None = 46, **changes) -> Receipt:
    facts = {"batch_size": 8, "operations": 60, "kernels": kernels, "capture_ns": 12_000_000, "memory_bytes": 41 << 20}
    return Receipt(**{"kernel_names": {"aten.mul": 16, "aten.add": 30}} | facts | changes)


def measured(timing, *, baseline=OFF, device=None, disturbance="", why_not="", **rest) -> MeasuredBatch:
    if disturbance:
        timing = replace(timing, decision="open", disturbance=disturbance)
    change = latency_change(baseline, timing, device) if device else None
    return MeasuredBatch(
        test="t.py::test_a[x y]",
        timing=timing,
        saved=baseline,
        device=device,
        change=change,
        why_not_judged=why_not,
        **rest,
    )


def speedup(timing, min_speedup, over="eager", **facts) -> Judgement:
    return gate.judge_speedup(measured(timing, **facts), min_speedup, over)


def slowdown(timing, baseline, max_slowdown, device, **facts):
    return gate.judge_baseline(measured(timing, baseline=baseline, device=device, **facts), max_slowdown)


def structure(receipt, baseline, max_new_kernels, **facts) -> Judgement:
    return gate.judge_structure(measured(PASSED, receipt=receipt, baseline=baseline, **facts), max_new_kernels)


def text(judgement: Judgement) -> str:
    lines = [f"{judgement.gate} {judgement.verdict.value}: {judgement.reason}", *judgement.evidence]
    lines += [f"remedy: {judgement.remedy}"] if judgement.remedy else []
    return "\n  ".join([*lines, *([f"would pass at: {judgement.accept:.2f}"] if judgement.accept is not None else [])])


def weighed(**changes) -> UndecidedState:
    return UndecidedState(**{"quiet": 34, "least_blocks": 10, "elapsed_ns": 8e8, "least_ns": 3e8} | changes)


FAILED = timed(1.052, 1.071, 1.094, "fail")
PASSED = timed(1.29, 1.31, 1.33, "pass")
OPEN = timed(1.08, 1.16, 1.24, "open")
AT_THRESHOLD = timed(1.14, 1.152, 1.17, "open")

SPEEDUPS = {
    "passed": speedup(PASSED, 1.15),
    "failed": speedup(FAILED, 1.15),
    "failed, eager moved": speedup(FAILED, 1.15, baseline=saved(), device=H200),
    "failed, baseline of another device": speedup(
        FAILED, 1.15, baseline=saved(device=T4), device=H200
    ),
    "failed, compute-bound": speedup(
        timed(1.01, 1.02, 1.03, "fail", busy_ns=116.5 * US), 1.15, receipt=receipt()
    ),
    "not judged, half of what there is": speedup(
        timed(1.05, 1.07, 1.09, "fail", busy_ns=105.0 * US), 1.10, why_not="shown", receipt=receipt(1)
    ),
    "failed, slower than eager by far": speedup(timed(0.03, 0.04, 0.05, "fail"), 1.15),
    "inconclusive": speedup(OPEN, 1.15),
    "inconclusive, at the threshold": speedup(AT_THRESHOLD, 1.15),
    "inconclusive, one block": speedup(
        timed(
            0.0, 1.3, math.inf, "open", blocks=1, noise_ratio=0.0, detectable_ratio=math.inf, measure_ns=9_000_000_000,
            notes=("the time budget of 10.0 s was too short for timed samples: the figures are from the warm-up",),
        ),
        1.15,
    ),
    "inconclusive, above, too few blocks": speedup(
        timed(1.06, 1.14, 1.16, "open", target=0.10, blocks=6, measure_ns=300_000_000, weighed=weighed(quiet=6)),
        0.10
    ),
    "inconclusive, above, most blocks disturbed": speedup(
        timed(1.06, 1.14, 1.16, "open", target=0.10, weighed=weighed(quiet=16)), 0.10
    ),
    "inconclusive, above, too few undisturbed blocks": speedup(
        timed(1.06, 1.14, 1.16, "open", target=0.10, blocks=14, weighed=weighed(quiet=9)), 0.10
    ),
    "inconclusive, below, too short": speedup(
        timed(0.90, 0.91, 0.92, "open", weighed=weighed(elapsed_ns=5e8, least_ns=6.25e8)), 1.15
    ),
    "inconclusive, below, too little evidence": speedup(
        timed(1.08, 1.10, 1.12, "open", weighed=weighed(), detectable_ratio=0.06), 1.15
    ),
    "inconclusive, above, nobody can tell why": speedup(timed(1.18, 1.20, 1.22, "open"), 1.15),
    "inconclusive, disturbed": speedup(
        FAILED, 1.15, disturbance="the GPU was throttled (power cap) while it was measured"
    ),
    "not judged": speedup(
        timed(
            1.05, 1.07, 1.09, "open", target=None, compiled=latency(118.0),
            medians=Medians(eager_ns=120_000.0, replay_ns=112_100.0, compiled_ns=118_000.0),
        ),
        1.15, why_not="no CUDA GPU here, this was a rehearsal on the CPU twin", device=TWIN,
    ),
    "failed, over compiled code": speedup(FAILED, 1.15, "compiled", device=H200),
    "inconclusive, over compiled code": speedup(OPEN, 1.15, "compiled"),
    "not judged, over compiled code": speedup(OPEN, 1.15, "compiled", why_not="rehearsal", device=TWIN),
}  # fmt: skip


def test_every_word_of_the_speedup_gate(golden):
    golden("gate_speedup.txt", "\n\n".join(f"[{case}]\n{text(found)}" for case, found in SPEEDUPS.items()))


@pytest.mark.parametrize("case", SPEEDUPS)
def test_the_speedup_verdict_follows_the_decision(case):
    word = case.split(",")[0].replace(" ", "-")
    assert SPEEDUPS[case].verdict.value == word
    assert SPEEDUPS[case].gate == ("over-compiled" if "compiled" in case else "speedup")


@pytest.mark.parametrize(
    ("low", "high", "at"),
    [(1.1271, 1.1729, True), (1.1269, 1.1729, False), (1.1271, 1.1731, False), (1.16, 1.17, True)],
)
def test_at_the_threshold_means_within_two_percent_on_both_sides(low, high, at):
    found = speedup(timed(low, 1.15, high, "open"), 1.15)
    assert ("at the threshold" in found.reason) is at


@pytest.mark.parametrize(
    ("low", "suggestion"),
    [
        (1.05, "1.05"),
        (1.0499, "1.00"),
        (1.0999, "1.05"),
        (1.10, "1.10"),
        (2.34, "2.30"),
        (0.30, "0.30"),
        (0.05, "0.05"),
    ],
)
def test_the_suggested_minimum_is_the_low_end_rounded_down(low, suggestion):
    found = speedup(timed(low, low + 0.01, low + 0.02, "fail", target=3.0), 3.0)
    assert found.accept == float(suggestion)


def test_nothing_is_suggested_below_any_speedup():
    found = speedup(timed(0.0499, 0.06, 0.07, "fail"), 1.15)
    assert (found.remedy, found.accept) == ("", None)


def test_on_a_noisy_machine_no_lower_gate_is_offered_and_no_limit_is_stated():
    noisy = timed(0.83, 0.97, 1.09, "fail", noise_ratio=0.05, busy_ns=120.0 * US)
    found = speedup(noisy, 1.15)
    assert (found.verdict, found.accept) == (Verdict.FAILED, None)
    assert "compute-bound" not in " ".join(found.evidence)


def test_a_timing_for_another_target_is_not_judged_by_this_one():
    with pytest.raises(ValueError, match=r"taken against 1\.15, and cannot be judged by 1\.3"):
        speedup(PASSED, 1.3)


def test_what_was_realised_counts_as_attainable():
    slow_events = timed(1.05, 1.07, 1.09, "fail", busy_ns=120.0 * US)
    found = speedup(slow_events, 1.15)
    assert "1.07x of at most 1.07x: compute-bound; its kernels take 120.0 µs by themselves" in found.evidence


def test_an_attainable_target_is_not_called_compute_bound():
    fast_device = timed(1.05, 1.07, 1.09, "fail", busy_ns=60.0 * US)
    found = speedup(fast_device, 1.15, receipt=receipt())
    line = "1.07x of at most 2.00x: 7 % of what a graph can gain; 46 kernels take 60.0 µs by themselves"
    assert line in found.evidence


# --- baseline --------------------------------------------------------------------------------------------------------


def against(replay_us: float, *, before=None, max_slowdown=0.10, device=H200, **options):
    timing = replace(PASSED, eager=latency(150.0), replay=latency(replay_us))
    return slowdown(timing, before or saved(), max_slowdown, device, **options)


FIVE = facts.sessions(112.0, 113.0, 112.4, 111.5, 112.6, reference_us=150.0, device=H200)

# fmt: off
BASELINES = {
    "same": against(112.1),
    "faster": against(98.0),
    "slower": against(140.5),
    "uncertain": against(126.0),
    "slower, other software": against(
        140.5, before=saved(device=replace(H200, torch="2.11.0", driver="570.86", threads=8, cuda=None))
    ),
    "same, other software": against(112.1, before=saved(device=replace(H200, torch="2.11.0"))),
    "slower, disturbed": against(140.5, disturbance="another process used the GPU"),
    "slower, not judged": against(140.5, why_not="this was a rehearsal on the CPU twin"),
    "slower, other kernels": against(140.5, receipt=receipt(62, kernel_names={"aten.mul": 32, "aten.add": 30})),
    "slower machine, other kernels": slowdown(
        replace(PASSED, eager=latency(190.0), replay=latency(140.5), reference=latency(180.0)),
        replace(saved(), sessions=FIVE),
        0.02, H200, receipt=receipt(62, kernel_names={"aten.mul": 32, "aten.add": 30}),
    ),
    "slower by more than the machine": slowdown(
        replace(PASSED, eager=latency(290.0), replay=latency(200.0), reference=latency(180.0)),
        replace(saved(), sessions=FIVE), 0.10, H200,
    ),
    "other kernels, beside other work": slowdown(
        replace(PASSED, replay=latency(140.5), reference=replace(latency(151.0), q25_ns=110e3, q75_ns=180e3)),
        replace(saved(), sessions=FIVE), 0.10, H200,
        receipt=receipt(62, kernel_names={"aten.mul": 32, "aten.add": 30}),
    ),
    "uncertain, saved beside other work": slowdown(
        replace(PASSED, replay=latency(126.0), reference=latency(151.0)),
        replace(saved(), sessions=(*FIVE[:3], replace(FIVE[3], unrest_log=0.3))), 0.10, H200,
    ),
    "slower with eager": slowdown(
        replace(PASSED, eager=latency(190.0), replay=latency(140.5)), saved(), 0.10, H200
    ),
    "slower with eager, five sessions and a reference": slowdown(
        replace(PASSED, eager=latency(190.0), replay=latency(140.5), reference=latency(151.0)),
        replace(saved(), sessions=FIVE),
        0.10, H200,
    ),
    "slower machine": slowdown(
        replace(PASSED, eager=latency(190.0), replay=latency(140.5), reference=latency(180.0)),
        replace(saved(), sessions=FIVE),
        0.02, H200,
    ),
    "slower, though the time fell": slowdown(
        replace(PASSED, eager=latency(150.0), replay=latency(108.0), reference=latency(125.0)),
        replace(saved(), sessions=FIVE),
        0.10, H200,
    ),
    "same, with a reference": slowdown(
        replace(PASSED, replay=latency(112.0), reference=latency(150.0)),
        replace(saved(), sessions=FIVE), 0.10, H200,
    ),
    "slower beside other work": slowdown(
        replace(PASSED, replay=latency(140.5), reference=replace(latency(151.0), q25_ns=130e3, q75_ns=180e3)),
        replace(saved(), sessions=FIVE), 0.10, H200,
    ),
    "slower compiled code": slowdown(
        replace(PASSED, eager=latency(150.0), compiled=latency(170.0), replay=latency(140.5)),
        replace(saved(), compiled=latency(140.0)), 0.10, H200,
    ),
    "another CPU": against(140.5, before=saved(device=replace(H200, host_cpu="AMD EPYC 7763"))),
    "another device": against(112.1, before=saved(device=T4)),
    "another kind": against(112.1, before=saved(device=TWIN)),
    "new": against(112.1, before=NEW),
    "missing under strict": against(112.1, before=ASKED_FOR),
    "off": against(112.1, before=OFF),
    "not comparable": against(112.1, before=OTHER),
    "eager slower, replay faster": slowdown(
        replace(PASSED, eager=latency(2000.0), replay=latency(90.0)), saved(950.0), 0.10, H200
    ),
}
# fmt: on


def figures(entry, *, unrest_log=0.0, **rest):
    """Judge three figures: one as fast, one in doubt, one slower."""
    found = facts.with_figures(entry, itl=60.0, time_per_token=50.0, ttft=900.0)
    now = {"itl": latency(60.2), "time_per_token": latency(56.0), "ttft": latency(1200.0)}
    batch = measured(PASSED, baseline=found, device=H200, **rest)
    changes = figure_changes(found, replace(session_of(PASSED, H200, figures=now), unrest_log=unrest_log))
    return gate.judge_figures(replace(batch, figure_changes=changes), 0.10)


def test_a_figure_of_generations_fails_if_it_is_slower_with_confidence_and_only_then():
    assert [each.verdict.value for each in figures(saved())] == ["passed", "passed", "failed"]
    assert [each.verdict.value for each in figures(saved(), disturbance="shared")][2] == "inconclusive"
    beside_other_work = [each.verdict.value for each in figures(saved(), unrest_log=0.01)]
    assert beside_other_work == ["passed", "passed", "inconclusive"]
    assert figures(saved(), why_not="shown") == figures(saved(), replaces_saved=True) == ()


def test_every_word_of_the_baseline_gate(golden):
    lines = [f"[{case}] {comparison}\n{text(found)}" for case, (found, comparison) in BASELINES.items()]
    lines += [f"[figure]\n{text(found)}" for found in figures(saved())]
    golden("gate_baseline.txt", "\n\n".join(lines))


@pytest.mark.parametrize(
    ("case", "verdict", "comparison"),
    [
        ("same", Verdict.PASSED, "same"),
        ("faster", Verdict.PASSED, "faster"),
        ("slower", Verdict.FAILED, "slower"),
        ("uncertain", Verdict.INCONCLUSIVE, "uncertain"),
        ("slower, disturbed", Verdict.INCONCLUSIVE, "uncertain"),
        ("slower, not judged", Verdict.NOT_JUDGED, "slower"),
        ("another device", Verdict.NOT_JUDGED, "not-comparable"),
        ("another kind", Verdict.NOT_JUDGED, "not-comparable"),
        ("new", Verdict.PASSED, "new"),
        ("missing under strict", Verdict.NOT_JUDGED, "new"),
        ("off", Verdict.PASSED, "off"),
        ("not comparable", Verdict.NOT_JUDGED, "not-comparable"),
    ],
)
def test_what_each_comparison_means(case, verdict, comparison):
    found, compared = BASELINES[case]
    assert (found.verdict, compared) == (verdict, comparison)
    assert found.gate == "baseline"


PRIOR = 1.645 * 0.03 * math.sqrt(2)
"""What one saved session may differ from the next by, with 95 % confidence on either side, as a log-ratio."""


@pytest.mark.parametrize(
    ("factor", "max_slowdown", "comparison"),
    [
        (math.sqrt(1.10) * 0.9999, 0.10, "same"),
        (math.sqrt(1.10) * 1.0001, 0.10, "uncertain"),
        (1.30 * math.exp(-PRIOR) * 0.9999, 0.30, "same"),
        (1.30 * math.exp(-PRIOR) * 1.0001, 0.30, "uncertain"),
        (1.10 * math.exp(PRIOR) * 0.9999, 0.10, "uncertain"),
        (1.10 * math.exp(PRIOR) * 1.0001, 0.10, "slower"),
        (1.0, 0.0, "same"),
        (1.0001, 0.0, "uncertain"),
        (math.exp(PRIOR) * 1.0001, 0.0, "slower"),
        (1 / 1.0999, 0.10, "same"),
        (1 / 1.1001, 0.10, "faster"),
        (math.exp(-PRIOR) * 1.0001, 0.02, "same"),
        (math.exp(-PRIOR) * 0.9999, 0.02, "faster"),
    ],
)
def test_the_comparison_turns_where_it_is_documented(factor, max_slowdown, comparison):
    assert against(100.0 * factor, before=saved(150.0, 100.0), max_slowdown=max_slowdown)[1] == comparison


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({"mig": "1g.18gb"}, "MIG off -> 1g.18gb"),
        ({"power_limit_w": 600}, "power limit 700 W -> 600 W"),
        ({"clocks": "SM clock set to 1500 MHz"}, "default clocks -> SM clock set to 1500 MHz"),
    ],
)
def test_other_hardware_is_named_and_decides_nothing(now, words):
    before = replace(H200, power_limit_w=700, clocks="default clocks")
    found, comparison = against(200.0, before=saved(device=before), device=replace(before, **now))
    assert (found.verdict, comparison) == (Verdict.NOT_JUDGED, "not-comparable")
    assert found.reason == f"not comparable: the hardware changed since the baseline: {words}"


def test_what_an_older_file_does_not_tell_is_no_difference():
    found, _ = against(112.0, device=replace(H200, power_limit_w=600, clocks="default clocks"))
    assert found.verdict is Verdict.PASSED


@pytest.mark.parametrize(("median_us", "q25_us"), [(150.0, 100.0), (100.0, 150.0)])
def test_one_quantile_alone_is_no_slowdown(median_us, q25_us):
    timing = replace(PASSED, replay=latency(median_us, q25_us))
    found, comparison = slowdown(timing, saved(120.0, 100.0), 0.10, H200)
    assert (found.verdict, comparison) == (Verdict.PASSED, "same")


def test_a_message_uses_one_statistic_for_all_sides():
    """Of saved sessions and of this one. Else one message says that the replay is faster, and that it got slower."""
    timing = replace(PASSED, eager=latency(170.0, 130.0), replay=latency(150.0, 97.0))
    found, _ = slowdown(timing, saved(replay=latency(112.4, 100.0)), 0.10, H200)
    assert "(lower quartile 100.0 -> 97.0 µs)" in found.reason
    assert "replay did not change (100.0 -> 97.0 µs)" in found.evidence[0]
    assert "eager" in found.evidence[0]
    assert "-> 130.0 µs" in found.evidence[0]


def test_the_quantile_that_decides_is_named():
    timing = replace(PASSED, replay=latency(150.0, 130.0))
    found, _ = slowdown(timing, saved(120.0, 100.0), 0.10, H200)
    assert "(lower quartile 100.0 -> 130.0 µs)" in found.reason


REPLACED = {
    "as fast, other software": (saved(), saved(device=replace(H200, torch="2.14.0")), ""),
    "slower": (saved(), saved(replay_us=243.9), "replay 112.4 -> 243.9 µs (+117 %)"),
    "faster": (saved(), saved(replay_us=56.7), "replay 112.4 -> 56.7 µs (-50 %)"),
    "slower, more kernels": (
        saved(kernels=32),
        saved(replay_us=243.9, kernels=62),
        "replay 112.4 -> 243.9 µs (+117 %), 32 -> 62 kernels",
    ),
    "as fast, one kernel": (saved(), saved(kernels=1), "replay 112.4 -> 112.4 µs (+0.0 %), 46 -> 1 kernel"),
    "as fast, other kernels": (
        saved(),
        saved(names={"aten.mul": 17, "aten.add": 29}),
        "replay 112.4 -> 112.4 µs (+0.0 %), other kernels: -1 aten.add, +1 aten.mul",
    ),
    "as fast, uncounted": (saved(), saved(kernels=None), ""),
    "slower, though the time fell": (
        replace(saved(), sessions=FIVE),
        replace(saved(), sessions=facts.sessions(108.0, reference_us=120.0, device=H200)),
        "replay 112.3 -> 108.0 µs (-3.8 %; +20 % relative to the reference workload)",
    ),
    "slower by its lower quartile, the median by more": (
        saved(replay=latency(140.0, 100.0)),
        saved(replay=latency(210.0, 130.0)),
        "replay lower quartile 100.0 -> 130.0 µs (+30 %)",
    ),
    "other hardware": (saved(device=T4), saved(), "other hardware: Tesla T4 (cuda) -> NVIDIA H200 (cuda)"),
}


@pytest.mark.parametrize("case", REPLACED)
def test_an_update_says_what_it_accepts_in_place_of_what(case):
    before, after, said = REPLACED[case]
    assert gate.replaced_text(before, after) == said


# --- structure -------------------------------------------------------------------------------------------------------

MORE = receipt(62, kernel_names={"aten.mul": 32, "aten.add": 30})
MANY = receipt(50, kernel_names={f"aten.op{i}": 5 + i for i in range(8)} | {"aten.add": 30})

COUNTED_ELSEWHERE = saved(device=replace(TWIN, name="Intel Xeon", host_cpu="Intel Xeon"))

STRUCTURES = {
    "same": structure(receipt(), saved(), 0, device=H200),
    "same, other software": structure(receipt(), saved(device=replace(H200, torch="2.11.0")), 0, device=H200),
    "more, shown only": structure(MORE, saved(), None),
    "more, too many": structure(MORE, saved(), 0),
    "more, too many for five": structure(MORE, saved(), 5, device=H200),
    "more, other software": structure(MORE, saved(device=replace(H200, torch="2.11.0")), 0, device=H200),
    "more, allowed": structure(MORE, saved(), 16),
    "fewer": structure(receipt(30, kernel_names={"aten.add": 30}), saved(), 0),
    "one": structure(receipt(1, kernel_names={"aten.add": 1}), saved(kernels=2, names={"aten.add": 2}), 0),
    "as many, but others": structure(receipt(46, kernel_names={"aten.mul": 17, "aten.add": 29}), saved(), 0),
    "more, without names": structure(receipt(62, kernel_names={}), saved(names={}), 0),
    "a long list": structure(MANY, saved(), None),
    "new": structure(receipt(), NEW, 0),
    "not comparable": structure(receipt(), OTHER, 0),
    "not comparable, shown only": structure(receipt(), OTHER, None),
    "another CPU's": structure(MORE, OTHER, 0, device=TWIN, counted=COUNTED_ELSEWHERE),
    "another CPU's, the same": structure(receipt(), OTHER, 0, device=TWIN, counted=COUNTED_ELSEWHERE),
    "accepted on another CPU": structure(
        receipt(), saved(device=TWIN, kernels=30, names={"aten.add": 30}), 0, device=TWIN, counted=COUNTED_ELSEWHERE
    ),
    "another kind": structure(receipt(), saved(device=TWIN), 0, device=H200),
    "uncounted": structure(receipt(None), saved(), 0),
    "uncounted, shown only": structure(receipt(None), saved(), None),
    "uncounted baseline": structure(receipt(), saved(kernels=None), 0),
}


def test_every_word_of_the_structure_gate(golden):
    golden("gate_structure.txt", "\n\n".join(f"[{case}]\n{text(found)}" for case, found in STRUCTURES.items()))


@pytest.mark.parametrize(
    ("case", "verdict"),
    [
        ("same", Verdict.PASSED),
        ("more, shown only", Verdict.PASSED),
        ("more, too many", Verdict.FAILED),
        ("more, too many for five", Verdict.FAILED),
        ("more, allowed", Verdict.PASSED),
        ("fewer", Verdict.PASSED),
        ("as many, but others", Verdict.PASSED),
        ("new", Verdict.PASSED),
        ("not comparable", Verdict.NOT_JUDGED),
        ("not comparable, shown only", Verdict.PASSED),
        ("another CPU's", Verdict.FAILED),
        ("another CPU's, the same", Verdict.PASSED),
        ("another kind", Verdict.NOT_JUDGED),
        ("uncounted", Verdict.NOT_JUDGED),
        ("uncounted, shown only", Verdict.PASSED),
        ("uncounted baseline", Verdict.NOT_JUDGED),
    ],
)
def test_what_each_structure_means(case, verdict):
    assert STRUCTURES[case].verdict is verdict
    assert STRUCTURES[case].gate == "structure"


def test_what_would_have_to_be_allowed_is_how_many_there_are_more():
    assert (STRUCTURES["more, too many"].accept, STRUCTURES["more, allowed"].accept) == (16, None)


@pytest.mark.parametrize(("allowed", "verdict"), [(15, Verdict.FAILED), (16, Verdict.PASSED), (17, Verdict.PASSED)])
def test_new_kernels_are_counted_exactly(allowed, verdict):
    assert structure(MORE, saved(), allowed).verdict is verdict


def test_the_twin_counts_alike_on_every_cpu():
    other_cpu = replace(TWIN, name="Intel Xeon", host_cpu="Intel Xeon")
    assert structure(MORE, saved(device=other_cpu), 0, device=TWIN).verdict is Verdict.FAILED


# --- agreement and capture -------------------------------------------------------------------------------------------

AGREES = Agreement(batch_size=8, replays=6, leaves=2, state_tensors=12, bit_exact=True, eager_repeatable=True)

PROOFS = {
    "agreement": judge_agreement(AGREES),
    "agreement on adversarial inputs": judge_agreement(replace(AGREES, adversaries=("zeros", "a row of NaN"))),
    "agreement with reservations": judge_agreement(
        replace(
            AGREES, bit_exact=False, eager_repeatable=False, replays=1, leaves=1, state_tensors=0,
            not_compared=("output.cache", "output[2]"), notes=("rng: both sides drew from one seed",),
        )
    ),
    "disagreement": judge_agreement(
        Disagreement(
            batch_size=8, where="output['logits']",
            message="8 of 512 values differ, by up to 0.25 (allowed: 1e-05)", evidence=("first at [0, 3]",),
        )
    ),
    "disagreement with a known cause": judge_agreement(
        Disagreement(batch_size=8, where="buffer 'steps'", message="5 instead of 6", finding_id="mutates-state")
    ),
    "disagreement with a line and a remedy": judge_agreement(
        Disagreement(batch_size=8, where="output", message="stale input", finding_id="rebinds-state"),
        places=("assigned at models/mlp.py:42 in forward: self.cached = y",),
        fix="fix: write in place with copy_ instead of assigning a new tensor",
    ),
    "captured": judge_capture(receipt()),
    "captured, one compiled region": judge_capture(receipt(1, opaque_regions=1, memory_bytes=None)),
    "captured, several regions": judge_capture(receipt(5, opaque_regions=3)),
    "captured, uncounted": judge_capture(receipt(None)),
    "empty": judge_capture(receipt(0)),
    "refused": refused(
        CaptureRefusal(
            "operation not permitted when stream is capturing", hazard="host-sync", operation="aten.item",
            site=Site(file="models/mlp.py", line=42, function="forward"),
        ),
        fix="keep the value on the device: torch.where instead of if",
    ),
    "refused without a line": refused(CaptureRefusal("unknown operation", hazard="unknown-op")),
}  # fmt: skip


def test_every_word_of_check_and_capture(golden):
    golden("gate_proof.txt", "\n\n".join(f"[{case}]\n{text(found)}" for case, found in PROOFS.items()))


@pytest.mark.parametrize(
    ("case", "gate", "verdict"),
    [
        ("agreement", "check", Verdict.PASSED),
        ("agreement with reservations", "check", Verdict.PASSED),
        ("disagreement", "check", Verdict.WRONG),
        ("captured", "capture", Verdict.PASSED),
        ("captured, uncounted", "capture", Verdict.PASSED),
        ("empty", "capture", Verdict.NOT_CAPTURED),
        ("refused", "capture", Verdict.NOT_CAPTURED),
    ],
)
def test_what_check_and_capture_mean(case, gate, verdict):
    assert (PROOFS[case].gate, PROOFS[case].verdict) == (gate, verdict)


@pytest.mark.parametrize(
    "found", [*SPEEDUPS.values(), *STRUCTURES.values(), *PROOFS.values(), *(b for b, _ in BASELINES.values())]
)
def test_every_judgement_has_a_reason_in_plain_words(found):
    assert found.reason
    assert not {"None", "nan", "inf"} & set(found.reason.replace("(", " ").replace(")", " ").split())


@pytest.mark.parametrize(("loud", "verdict"), [(True, Verdict.NOT_CAPTURED), (False, Verdict.WRONG)])
def test_a_hazard_refuses_the_capture_or_makes_it_wrong(loud, verdict):
    finding = Finding(
        id="host-sync",
        level="error",
        message="the host waits for a value",
        fix="keep it on the device",
        evidence="`x.item()`",
        site=Site(file="model.py", line=20),
        loud=loud,
    )
    judgement = gate.judge_finding(finding)
    assert (judgement.gate, judgement.verdict) == ("audit", verdict)
    assert judgement.reason == "model.py:20: the host waits for a value [host-sync]"
    assert (judgement.evidence, judgement.remedy) == (("`x.item()`",), "fix: keep it on the device")


def test_a_hazard_in_a_library_names_the_line_of_the_project_too():
    finding = Finding(
        id="host-sync",
        level="error",
        message="the host waits for a value",
        fix="keep it on the device",
        evidence="`x.item()`",
        site=Site(file="/env/lib/models.py", line=20),
        called_from=Site(file="tests/test_model.py", line=4, function="test_model"),
    )
    assert gate.judge_finding(finding).evidence == ("`x.item()`", "called from tests/test_model.py:4 in test_model")


def test_a_failed_compile_tells_its_first_line_and_keeps_the_rest():
    judgement = gate.judge_compile_failure(CudagraphError("inductor failed\n  at batch 8\n  use compile='none'"))
    assert (judgement.gate, judgement.verdict) == ("compile", Verdict.NOT_CAPTURED)
    assert judgement.reason == "inductor failed"
    assert judgement.evidence == ("at batch 8", "use compile='none'")
