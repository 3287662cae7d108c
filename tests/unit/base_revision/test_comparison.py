"""Two revisions' processes, paired: what is compared, what is new, and what was there and could not be measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.facts import batch, judgement, latency, timing

from pytest_cudagraph.base_revision.comparison import _left_text, pair
from pytest_cudagraph.base_revision.judge import judge_base
from pytest_cudagraph.base_revision.processes import CollectedOutcome, Sample
from pytest_cudagraph.values import Verdict

TEST = "test_a.py::test_m"
PASSED, FAILED = CollectedOutcome(how="passed"), CollectedOutcome(how="failed", why="FileNotFoundError: weights.bin")


def measured(*sizes, replay_ns=100.0, verdict=Verdict.NOT_JUDGED, name=TEST, nodeid=TEST, end=PASSED):
    """One process that measured a test at these sizes."""
    timed = None
    if replay_ns is not None:
        timed = replace(
            timing(), eager=replace(latency(1.0), q25_ns=200.0), replay=replace(latency(1.0), q25_ns=replay_ns)
        )
    batches = {(name, size): batch(size, judgement(verdict), timing=timed) for size in sizes}
    return Sample(batches=batches, modules=(), nodeids={name: nodeid}, ends={nodeid: end})


def silent(**ends):
    """One process in which nothing was measured; ``test_m`` is the test at hand, ``test_a`` its file."""
    places = {"test_m": TEST, "test_a": "test_a.py", "other": "test_b.py::test_m"}
    return Sample(batches={}, modules=(), ends={places[name]: end for name, end in ends.items()})


def found(base, head=None, key=(TEST, 4)):
    base = [base] * 5 if isinstance(base, Sample) else base
    return pair(base, head or [measured(4)] * 5, "v1 (abc)")[key]


def judged(base, head=None):
    judgement = judge_base(found(base, head), 0.05)
    return judgement.verdict, judgement.reason


def test_what_both_sides_measured_is_compared():
    comparison = found(measured(4, replay_ns=90.0))
    assert comparison.missing == ""
    assert (comparison.base_replay_ns, comparison.head_replay_ns) == ((90.0,) * 5, (100.0,) * 5)


def test_a_test_that_the_base_did_not_collect_is_new():
    new = (Verdict.PASSED, "not compared with v1 (abc): new: not in the base")
    assert judged(silent()) == new
    assert judged(silent(other=FAILED)) == new


@pytest.mark.parametrize(
    ("base", "reason"),
    [
        (silent(test_m=FAILED), "failed in the base: FileNotFoundError: weights.bin"),
        (
            silent(test_m=CollectedOutcome(how="failed in setup", why="KeyError: 'x'")),
            "failed in setup in the base: KeyError: 'x'",
        ),
        (silent(test_m=CollectedOutcome(how="skipped", why="no weights")), "skipped in the base: no weights"),
        (silent(test_a=CollectedOutcome(how="skipped", why="no weights")), "skipped in the base: no weights"),
        (silent(test_m=CollectedOutcome(how="deselected")), "deselected in the base"),
        (silent(test_m=PASSED), "not measured by its test in the base"),
        (
            measured(4, replay_ns=None, verdict=Verdict.WRONG, end=CollectedOutcome(how="failed", why="W")),
            "wrong in the base: W",
        ),
        ([measured(4), *[silent(test_m=FAILED)] * 4], f"not measured in every process of the base: {FAILED.why}"),
        ([silent(), silent(test_m=FAILED)], "failed in the base: FileNotFoundError: weights.bin"),
        ([silent(), silent(test_m=PASSED)], "not measured by its test in the base"),
    ],
)
def test_a_test_that_the_base_has_and_could_not_measure_is_not_judged(base, reason):
    assert judged(base) == (Verdict.NOT_JUDGED, f"not compared with v1 (abc): {reason}")


def test_a_batch_size_that_the_bases_test_does_not_ask_for_is_new():
    assert judged(measured(1, 2)) == (
        Verdict.PASSED,
        "not compared with v1 (abc): new: not a batch size of the base",
    )
    assert judged(measured(1, 2, end=FAILED)) == (
        Verdict.NOT_JUDGED,
        "not compared with v1 (abc): failed in the base: FileNotFoundError: weights.bin",
    )


def test_a_name_of_its_own_is_found_wherever_its_test_has_gone():
    head = [measured(4, name="decoder")] * 5
    base = [measured(name="decoder", nodeid="test_b.py::test_m", end=FAILED)] * 5
    assert found(base, head, key=("decoder", 4)).missing == "failed in the base"


def test_what_the_head_measures_now_and_then_is_not_compared():
    head = [measured(4), silent(test_m=FAILED)]
    assert judged([measured(4)] * 2, head) == (
        Verdict.NOT_JUDGED,
        "not compared with v1 (abc): not measured in every process of the head: FileNotFoundError: weights.bin",
    )


def test_the_time_left_is_that_of_the_processes_to_come():
    assert [_left_text(12.0, done, 10) for done in (0, 2, 4)] == ["", ", some 48 s left", ", some 18 s left"]
