"""What sessions differ by decides, and a history holds one and the same."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from scipy import stats as scipy_stats
from tests.facts import CPU, H200, latency, saved, sessions, timing, with_figures

from pytest_cudagraph.baseline import (
    ENOUGH,
    KEPT,
    change,
    continued,
    figure_changes,
    is_continued,
    moved_figures,
    session_of,
)
from pytest_cudagraph.baseline.history import _NORMAL_QUANTILE, _T_QUANTILES, LEAST_SPREAD, PRIOR_SPREAD, joined
from pytest_cudagraph.values import SavedBatch

FIVE = (60.0, 61.0, 59.5, 60.2, 60.6)


def held(replay_us, *saved_us, reference_us=None, now_us=None, device=H200):
    before = saved(sessions=sessions(*saved_us, reference_us=reference_us))
    return change(before, sessions(replay_us, reference_us=now_us, device=device)[0])


def test_the_quantiles_are_those_of_the_distributions():
    assert pytest.approx(scipy_stats.norm.ppf(0.95), abs=5e-4) == _NORMAL_QUANTILE
    assert sorted(_T_QUANTILES) == list(range(ENOUGH - 1, KEPT))
    for freedom, quantile in _T_QUANTILES.items():
        assert quantile == pytest.approx(scipy_stats.t.ppf(0.95, freedom), abs=5e-4)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_too_few_sessions_are_held_to_the_prior(count):
    found = held(72.0, *FIVE[:count])

    assert found.is_prior
    assert found.spread == PRIOR_SPREAD == 0.03
    assert found.margin_log == pytest.approx(1.645 * 0.03 * math.sqrt(1 + 1 / count))


@pytest.mark.parametrize("count", [5, 8, 10])
def test_enough_sessions_are_held_to_their_own_spread(count):
    medians = [60.0 * factor for factor in (1.0, 1.02, 0.97, 1.01, 0.99, 1.03, 0.98, 1.0, 1.01, 0.97)[:count]]
    logs = [math.log(value) for value in medians]
    found = held(72.0, *medians)

    spread = scipy_stats.tstd(logs)
    assert not found.is_prior
    assert found.spread == pytest.approx(spread)
    assert found.margin_log == pytest.approx(
        scipy_stats.t.ppf(0.95, count - 1) * spread * math.sqrt(1 + 1 / count), rel=1e-3
    )
    assert found.log_ratio == pytest.approx(math.log(72.0) - scipy_stats.tmean(logs))


def test_sessions_that_hardly_differ_are_not_believed():
    assert held(60.0, *[60.0] * 5).spread == LEAST_SPREAD


def test_a_reference_takes_the_machine_out():
    found = held(66.0, *FIVE[:1], reference_us=100.0, now_us=110.0)

    assert found.log_ratio == pytest.approx(0.0, abs=1e-9)
    assert found.reference_ns == pytest.approx((100e3, 110e3))


@pytest.mark.parametrize(
    "device", [replace(H200, torch="2.13.0"), replace(H200, driver="600"), replace(H200, python="3.13.0")]
)
def test_a_reference_under_other_software_would_hide_its_cost(device):
    found = held(66.0, 60.0, reference_us=100.0, now_us=110.0, device=device)

    assert found.reference_ns is None
    assert found.log_ratio == pytest.approx(math.log(1.1))


def test_without_a_reference_on_either_side_latencies_are_compared_as_they_are():
    assert held(66.0, 60.0, now_us=110.0).reference_ns is None
    assert held(66.0, 60.0, reference_us=100.0).reference_ns is None


def test_sessions_of_an_older_file_step_aside_for_those_with_a_reference():
    with_reference = sessions(60.0, reference_us=100.0)
    before = saved(sessions=(*sessions(80.0), *with_reference))
    found = change(before, sessions(66.0, reference_us=110.0)[0])

    assert (found.sessions, found.log_ratio) == (1, pytest.approx(0.0, abs=1e-9))


def test_twenty_percent_slower_fails_from_the_first_session_on_and_equal_speed_passes():
    for count in range(1, KEPT + 1):
        assert held(72.0, *[60.0] * count).comparison(0.10) == "slower"
        assert held(60.0, *[60.0] * count).comparison(0.10) == "same"
        assert held(66.0, *[60.0] * count).comparison(0.10) == "uncertain"


@pytest.mark.parametrize("max_slowdown", [0.02, 0.05, 0.10])
def test_equal_speed_passes_a_tight_gate_before_there_are_enough_sessions(max_slowdown):
    assert held(60.0, 60.0).comparison(max_slowdown) == "same"
    assert held(60.0 * (1 + max_slowdown * 0.45), 60.0).comparison(max_slowdown) == "same"
    assert held(60.0 * (1 + max_slowdown * 0.55), 60.0).comparison(max_slowdown) == "uncertain"


def test_sessions_that_differ_leave_a_tight_gate_undecided():
    assert held(60.0, 58.0, 62.0, 60.0, 59.0, 61.0).comparison(0.03) == "uncertain"


def test_the_margin_grows_by_what_a_replay_need_not_have_followed():
    still, moved = (held(60.0, 60.0, reference_us=100.0, now_us=now) for now in (100.0, 150.0))
    assert moved.margin_log == pytest.approx(still.margin_log + 0.3 * math.log(1.5))


def test_a_restless_machine_widens_the_margin_by_what_is_beyond_rest():
    quiet = session_of(replace(timing(), reference=latency(100.0)), H200)
    loud = session_of(replace(timing(), reference=replace(latency(100.0), q25_ns=80e3, q75_ns=120e3)), H200)

    assert quiet.unrest_log == 0.0
    assert loud.unrest_log == pytest.approx(math.log(1.5) - 0.1)
    before = saved(sessions=(loud, quiet))
    unrest = 0.4 * loud.unrest_log  # a median of many calls lies nearer than their quartiles
    assert change(before, quiet).unrest_log == pytest.approx(unrest / 2)
    assert change(before, loud).unrest_log == pytest.approx(unrest * math.hypot(1, 0.5))


def test_a_replay_whose_own_quartiles_lie_apart_is_of_a_restless_machine_too():
    spread = replace(latency(60.0), q25_ns=50e3, q75_ns=100e3)
    session = session_of(replace(timing(), replay=spread, reference=latency(100.0)), H200)
    assert session.unrest_log == pytest.approx(math.log(2) - 0.1)


def restless(replay_us, reference_us, unrest_log=0.4):
    (session,) = sessions(replay_us, reference_us=reference_us)
    return replace(session, unrest_log=unrest_log)


def test_a_reference_that_other_work_disturbed_excuses_and_never_accuses():
    before = saved(sessions=(restless(60.0, 150.0),))
    # The replay itself did not move: a quicker reference alone makes no slowdown, and equal speed is not proved by it.
    found = change(before, restless(60.0, 100.0))

    assert found.log_ratio == pytest.approx(0.0, abs=1e-9)
    assert found.apart_log == pytest.approx(math.log(1.5))
    assert found.comparison(0.10) == "uncertain"


def test_a_slower_machine_excuses_beside_other_work_too():
    found = change(saved(sessions=(restless(60.0, 100.0),)), restless(90.0, 150.0))

    assert (found.log_ratio, found.apart_log) == (pytest.approx(0.0, abs=1e-9), 0.0)
    assert found.reference_ns is not None


def test_a_reference_at_rest_decides_alone():
    found = change(saved(sessions=(restless(60.0, 150.0, 0.0),)), restless(60.0, 100.0, 0.0))

    assert (found.log_ratio, found.apart_log) == (pytest.approx(math.log(1.5)), 0.0)


# Two runs beside busy processes on two cores, of 32 kernels and then of 62 of the same size: medians and lower
# quartiles of replay and reference in microseconds, unrest.
BUSY = {
    1: ((56.68, 54.60, 148.6, 123.7, 0.3771), (155.7, 136.0, 170.8, 118.3, 0.5029)),
    2: ((65.47, 63.17, 156.6, 124.0, 0.4083), (200.8, 144.5, 189.1, 169.0, 0.3535)),
}


@pytest.mark.parametrize("batch_size", BUSY)
def test_twice_the_kernels_are_slower_beside_other_work_too(batch_size):
    few, many = (
        replace(
            sessions(median, reference_us=reference)[0],
            q25_ns=q25 * 1e3,
            reference_q25_ns=reference_q25 * 1e3,
            unrest_log=unrest,
        )
        for median, q25, reference, reference_q25, unrest in BUSY[batch_size]
    )
    assert change(saved(sessions=(few,)), many).comparison(0.10) == "slower"
    assert change(saved(sessions=(many,)), many).comparison(0.10) == "same"


def recorded(replay_us, **facts) -> SavedBatch:
    return saved(replay=latency(replay_us), sessions=sessions(replay_us), **facts)


def test_a_session_that_found_the_same_is_added():
    entry = continued(saved(sessions=sessions(60.0, 60.5)), recorded(60.2))

    assert [session.median_ns for session in entry.sessions] == [60_000.0, 60_500.0, 60_200.0]
    # The latencies are those of before: a diff of one line.
    assert entry.replay == saved().replay


def test_a_figure_that_moved_begins_its_own_history_anew():
    before = with_figures(saved(sessions=sessions(60.0, 60.5)), itl=61.0, ttft=900.0)
    now = with_figures(recorded(60.2), itl=61.5, ttft=1200.0)

    assert list(moved_figures(before, now)) == ["ttft"]
    assert [sorted(each.figures) for each in continued(before, now).sessions] == [["itl"], ["itl"], ["itl", "ttft"]]
    assert [sorted(each.figures) for each in joined(before, now).sessions] == [["itl"], ["itl", "ttft"], ["itl"]]
    assert figure_changes(before, now.sessions[0])["ttft"].comparison(0.10) == "slower"
    assert figure_changes(saved(), now.sessions[0]) == {}


def test_a_disturbed_figure_widens_its_own_margin_only():
    before, now = (with_figures(saved(sessions=sessions(60.0)), itl=61.0, ttft=900.0) for _ in range(2))
    (session,) = now.sessions
    figures = {**session.figures, "itl": replace(session.figures["itl"], unrest_log=0.5)}
    found = figure_changes(before, replace(session, figures=figures))

    assert found["itl"].margin_log == pytest.approx(found["ttft"].margin_log + 0.4 * 0.5)


def test_only_the_last_sessions_are_kept():
    entry = continued(saved(sessions=sessions(*[60.0] * KEPT)), recorded(60.2))

    assert len(entry.sessions) == KEPT
    assert entry.sessions[-1].median_ns == 60_200.0


@pytest.mark.parametrize(
    "new",
    [
        recorded(65.0),
        recorded(55.0),
        recorded(60.0, kernels=47),
        recorded(60.0, kernel_names={"aten.mul": 46}),
        recorded(60.0, compiled=latency(80.0)),
        recorded(60.0, device=CPU),
        recorded(60.0, device=replace(H200, torch="2.13.0")),
        recorded(60.0, device=replace(H200, mig="1g.18gb")),
    ],
    ids=["slower", "faster", "more kernels", "other kernels", "compiled", "other device", "other torch", "other slice"],
)
def test_what_was_accepted_and_is_something_else_begins_anew(new):
    before = saved(sessions=sessions(*FIVE))

    assert not is_continued(before, new)
    assert continued(before, new) == new


def test_noise_does_not_make_another_speed_the_same():
    (session,) = sessions(80.0)
    noisy = replace(recorded(80.0), sessions=(replace(session, unrest_log=0.5),))
    before = saved(sessions=sessions(*FIVE))

    assert change(before, noisy.sessions[0]).comparison(0.10) == "uncertain"
    assert not is_continued(before, noisy)


def test_eager_that_moved_is_shown_with_the_sessions_kept():
    entry = continued(saved(sessions=sessions(*FIVE)), recorded(60.0, eager=latency(140.0)))

    assert entry.eager == latency(140.0)
    assert len(entry.sessions) == 6
