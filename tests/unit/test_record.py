"""Only what passed is kept, and only what was asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.facts import CPU, H200, SAVED_AT, batch, by_key, judgement, latency, report, saved, sessions, timing

from pytest_cudagraph import gate, record
from pytest_cudagraph.baseline import KEPT, latency_change
from pytest_cudagraph.values import MeasuredBatch, Receipt, Verdict

NAME = "tests/test_a.py::test_a"


def plan(*reports, update="changed", kept=()):
    return record.entries(reports, update, by_key(*kept), saved_at=SAVED_AT)


def test_what_passed_and_is_new_is_written_whole():
    assert plan(report()) == record.Plan(write=(saved(),), new=((NAME, 8),))


def test_entries_come_ordered_by_name_and_batch_size():
    found = plan(report("b", batch(16), batch(2)), report("a"))

    assert [(entry.name, entry.batch_size) for entry in found.write] == [("a", 8), ("b", 2), ("b", 16)]


@pytest.mark.parametrize("verdict", [Verdict.FAILED, Verdict.WRONG, Verdict.NOT_CAPTURED, Verdict.INCONCLUSIVE])
@pytest.mark.parametrize("which", ["check", "speedup", "baseline", "structure"])
@pytest.mark.parametrize("update", ["new", "changed", "all"])
def test_whatever_did_not_pass_is_refused(verdict, which, update):
    story = report(NAME, batch(8, judgement(gate="capture"), judgement(verdict, gate=which, reason="see here")))

    words = verdict.value.replace("-", " ")
    refused = ((NAME, 8, f"{words}: see here"),)
    assert plan(story, update=update) == record.Plan(refused=refused)


def test_speed_that_was_not_judged_is_refused():
    story = report(NAME, batch(8, judgement(Verdict.NOT_JUDGED, reason="a rehearsal")))

    assert plan(story).refused == ((NAME, 8, "not judged: a rehearsal; to save it: --cudagraph-update"),)


def test_a_verdict_is_not_said_twice():
    unjudged = report(NAME, batch(8, judgement(Verdict.NOT_JUDGED, reason="speed is not judged: two workers")))
    assert plan(unjudged).refused == ((NAME, 8, "speed is not judged: two workers; to save it: --cudagraph-update"),)


@pytest.mark.parametrize("which", ["baseline", "structure"])
def test_a_comparison_with_nothing_does_not_stand_in_the_way(which):
    story = report(NAME, batch(8, judgement(), judgement(Verdict.NOT_JUDGED, gate=which)))

    assert len(plan(story).write) == 1


def test_an_audit_error_refuses_every_batch_size():
    story = report(NAME, batch(1), batch(2), judgements=(judgement(Verdict.WRONG, gate="audit", reason="rng"),))

    assert plan(story).refused == ((NAME, 1, "wrong: rng"), (NAME, 2, "wrong: rng"))


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        ({"judgements": ()}, "nothing was judged"),
        ({"agreement": None}, "replay was not checked"),
        ({"timing": None}, "it was not timed"),
    ],
)
def test_what_was_not_proved_is_refused(missing, reason):
    assert plan(report(NAME, replace(batch(), **missing))).refused == ((NAME, 8, reason),)


def test_a_report_without_a_device_is_refused():
    assert plan(report(NAME, batch(), device=None)).refused == ((NAME, 8, "no device"),)


def test_two_tests_of_one_name_are_both_refused():
    found = plan(report("encoder", nodeid="t.py::b"), report("encoder", nodeid="t.py::a"))

    assert found == record.Plan(refused=(("encoder", 8, "t.py::a and t.py::b use the same name: give each its own"),))


def test_the_last_of_several_runs_of_a_test_counts():
    failed = report(NAME, batch(8, judgement(Verdict.FAILED, reason="slow")))

    assert len(plan(failed, report()).write) == 1
    assert len(plan(report(), failed).refused) == 1


def test_new_never_replaces():
    found = plan(report(), report("other"), update="new", kept=[saved(kernels=1)])

    assert [entry.name for entry in found.write] == ["other"]


def test_all_replaces_also_what_did_not_change():
    found = plan(report(), update="all", kept=[saved()])

    assert (found.write, found.changed) == ((saved(),), ((NAME, 8),))


FULL = sessions(*[60.0] * KEPT)


@pytest.mark.parametrize(
    ("old", "is_changed"),
    [
        (saved(), False),
        (saved(eager=latency(240)), False),
        (saved(replay=latency(60 * 1.06)), False),
        (saved(replay=latency(60 * 1.08)), True),
        (saved(replay=latency(60 / 1.08)), True),
        (saved(kernels=45), True),
        (saved(kernel_names={"aten.mul": 46}), True),
        (saved(compiled=latency(80)), True),
        (saved(device=replace(H200, torch="2.10.0")), True),
        (saved(device=replace(H200, power_limit_w=600)), False),
    ],
)
def test_changed_begins_anew_only_where_something_moved(old, is_changed):
    found = plan(report(), update="changed", kept=[old])

    assert len(found.write) == 1
    assert found.changed == (((NAME, 8),) if is_changed else ())
    assert found.new == ()


@pytest.mark.parametrize(
    ("old", "is_written"),
    [
        (saved(sessions=FULL[1:]), True),
        (saved(sessions=FULL), False),
        (saved(sessions=FULL, eager=latency(240)), True),
        (saved(sessions=FULL, kernels=45), True),
    ],
)
def test_a_full_history_that_holds_is_left_alone(old, is_written):
    found = plan(report(), update="changed", kept=[old])

    assert bool(found.write) == is_written


def test_what_is_written_tells_its_day_its_commit_its_software_and_its_reference():
    story = report(NAME, batch(timing=replace(timing(), reference=latency(150.0))))
    (entry,) = record.entries([story], "new", {}, saved_at=SAVED_AT, commit="1a2b3c4+").write

    (session,) = entry.sessions
    assert (session.date, session.commit) == ("2026-11-21", "1a2b3c4+")
    assert (session.reference_median_ns, session.reference_q25_ns) == (150_000.0, 148_500.0)
    assert session.software == "Python 3.12.3, torch 2.11.0, driver 580.159"
    assert (session.median_ns, session.q25_ns) == (60_000.0, 59_400.0)


def counted(reports, kept=(), complete_run=True, plan=None):
    found = record.counts(reports, by_key(*kept), complete_run=complete_run, plan=plan)
    assert tuple(found) == record.COUNTED
    return {word: count for word, count in found.items() if count}


def test_each_batch_size_counts_once_under_its_verdict():
    verdicts = [batch(size, judgement(verdict)) for size, verdict in enumerate(Verdict, start=1)]
    slower = batch(20, judgement(), judgement(Verdict.FAILED, gate="baseline"))

    assert counted([report("a", *verdicts, slower)]) == {
        "passed": 1,
        "failed": 1,
        "slower": 1,
        "inconclusive": 1,
        "wrong": 1,
        "not captured": 1,
        "not judged": 1,
    }


def test_remarks_stand_beside_the_verdict():
    other = Receipt(batch_size=4, operations=50, kernels=46, kernel_names={"aten.mul": 41, "aten.addmm": 5})
    batches = [
        batch(1, comparison="new"),
        batch(2, comparison="faster"),
        batch(3, comparison="same"),
        batch(4, comparison="same", baseline=saved("a", 4), receipt=other),
        batch(5, comparison="not-comparable"),
    ]

    counts = {"passed": 5, "faster": 1, "not comparable": 1, "changed": 1, "no baseline yet": 1}
    assert counted([report("a", *batches)]) == counts


def test_what_is_written_is_no_longer_missing():
    story = report("a", batch(1, comparison="new"), batch(2, comparison="not-comparable"), batch(3), batch(4))
    kept = [saved("a", 3), saved("a", 4, kernels=40)]
    found = plan(story, kept=kept)

    assert counted([story], kept, plan=found) == {"passed": 4, "new": 2, "changed": 1}


def test_what_strict_misses_is_counted_once_and_not_as_passed():
    lacks = judgement(Verdict.NOT_JUDGED, gate="baseline", reason="no entry")
    found = report(NAME, batch(1, judgement(), lacks, comparison="new"), batch(8))
    assert counted([found]) == {"passed": 1, "no baseline yet": 1}


def test_a_model_that_never_came_to_a_batch_size_counts_once():
    refused = replace(report(), batches=(), judgements=(judgement(Verdict.NOT_CAPTURED, gate="compile"),))

    assert counted([refused]) == {"not captured": 1}


def test_stale_is_what_a_complete_run_did_not_cover():
    kept = [saved(), saved(batch_size=16), saved("gone")]

    assert counted([report()], kept) == {"passed": 1, "stale": 2}
    assert record.stale([report()], by_key(*kept), complete_run=True) == (("gone", 8), (NAME, 16))


def test_a_run_of_selected_tests_knows_of_nothing_stale():
    assert counted([report()], [saved("gone")], complete_run=False) == {"passed": 1}


def test_a_story_that_ended_early_makes_nothing_stale():
    wrong = report(NAME, batch(8, judgement(Verdict.WRONG)))
    refused = replace(report("b"), batches=(), judgements=(judgement(Verdict.NOT_CAPTURED, gate="audit"),))

    assert record.stale([wrong, refused], by_key(saved(batch_size=1), saved("b")), complete_run=True) == ()


def compared(old, new, max_slowdown=0.10):
    (change,) = record.compare(by_key(*old), by_key(*new), max_slowdown=max_slowdown)
    return change


@pytest.mark.parametrize(
    ("factor", "comparison"),
    [
        (1.0, "same"),
        (1.04, "same"),
        (1.06, "uncertain"),
        (1.17, "uncertain"),
        (1.18, "slower"),
        (1 / 1.09, "same"),
        (1 / 1.11, "faster"),
    ],
)
def test_slower_is_beyond_tolerance_and_session_noise(factor, comparison):
    assert compared([saved()], [saved(replay=latency(60 * factor))]).comparison == comparison


@pytest.mark.parametrize("max_slowdown", [0.0, 0.03, 0.1, 0.5])
@pytest.mark.parametrize("factor", [0.5, 0.8, 0.92, 0.95, 0.99, 1.0, 1.02, 1.05, 1.08, 1.12, 1.2, 1.6, 3.0])
def test_two_files_are_compared_as_the_latency_gate_compares(factor, max_slowdown):
    now = timing(replay_us=60 * factor)
    change = latency_change(saved(), now, H200)
    batch = MeasuredBatch(timing=now, device=H200, saved=saved(), change=change)
    _, of_gate = gate.judge_baseline(batch, max_slowdown)

    assert compared([saved()], [saved(replay=latency(60 * factor))], max_slowdown).comparison == of_gate


def test_a_median_that_moved_alone_is_no_slowdown():
    moved = replace(latency(60.0), median_ns=90_000.0)

    assert compared([saved()], [saved(replay=moved)]).comparison == "same"


def test_entries_on_one_side_only_are_new_or_gone():
    assert compared([], [saved()]).comparison == "new"
    assert compared([saved()], []).comparison == "gone"


def test_other_hardware_is_not_comparable_and_other_software_is():
    assert compared([saved()], [saved(device=CPU)]).comparison == "not-comparable"
    assert compared([saved()], [saved(device=replace(H200, torch="2.12"))]).comparison == "same"


def test_added_kernels_need_a_count_on_both_sides():
    assert compared([saved()], [saved(kernels=62)]).added_kernels == 16
    assert compared([saved(kernels=None)], [saved()]).added_kernels is None
    assert compared([], [saved()]).added_kernels is None


def test_a_backend_that_does_not_count_is_recorded_as_such():
    uncounted = Receipt(batch_size=8, operations=None, kernels=None)

    assert plan(report(NAME, batch(receipt=uncounted))).write == (saved(kernels=None, kernel_names={}),)
    assert plan(report(NAME, batch(receipt=None))).write == (saved(kernels=None, kernel_names={}),)
