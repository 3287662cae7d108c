"""The marker that a measurement supports."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from tests.facts import batch, judgement, report, timing

from pytest_cudagraph.report import suggestions
from pytest_cudagraph.values import Interval, MinSource, Verdict


def measured(batch_size, low, noise_ratio=0.004, **rest):
    speedup = Interval(estimate=low + 0.1, low=low, high=low + 0.2)
    return batch(batch_size, timing=replace(timing(), speedup=speedup, noise_ratio=noise_ratio), **rest)


def suggested(*batches, **rest):
    (line,) = suggestions([report("t.py::test_a", *batches, **rest)])
    return line.removeprefix("suggest: t.py::test_a: ")


def test_each_batch_size_gets_its_lower_bound_less_the_room_that_sessions_need():
    found = suggested(measured(8, 1.30), measured(1, 2.10))
    assert found == "@pytest.mark.graph_speedup(min={1: 2.00, 8: 1.25})"


@pytest.mark.parametrize(("noise_ratio", "least"), [(0.004, "1.90"), (0.029, "1.90"), (0.06, "1.85"), (0.20, "1.60")])
def test_noise_beyond_that_room_is_taken_off(noise_ratio, least):
    assert suggested(measured(1, 2.0, noise_ratio)) == f"@pytest.mark.graph_speedup(min={least})"


def test_batch_sizes_that_agree_need_no_mapping():
    assert suggested(measured(1, 2.10), measured(8, 2.08)) == "@pytest.mark.graph_speedup(min=2.00)"


def test_a_test_that_failed_its_gate_is_told_what_it_would_pass():
    failed = batch(1, judgement(Verdict.FAILED), timing=timing(120.0, 110.0))
    assert suggested(failed) == "@pytest.mark.graph_speedup(min=1.00)"


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (MinSource(place="marker"), "@pytest.mark.graph_speedup(min=2.00)"),
        (MinSource(place="marker", is_mapping=True), "@pytest.mark.graph_speedup(min={1: 2.00, 8: 2.00})"),
        (MinSource(place="argument"), "min_speedup=2.00 in the call: its argument overrides markers"),
    ],
)
def test_what_is_suggested_would_be_heard_where_it_is_written(source, line):
    assert suggested(measured(1, 2.10), measured(8, 2.08), min_source=source) == line


NO_EVIDENCE = "too few blocks for a lower bound; give a larger --cudagraph-time-budget"


@pytest.mark.parametrize("place", ["setting", "marker", "argument"])
def test_a_size_without_evidence_is_neither_gated_nor_left_out(place):
    """One number would hold for it too, and a mapping without it would no longer measure it."""
    found = suggested(measured(1, 2.10), measured(2, 1.30), measured(8, 0.0), min_source=MinSource(place=place))
    assert found == f"nothing, for batch 8: {NO_EVIDENCE}"


def test_all_sizes_without_evidence_are_named():
    assert suggested(measured(1, 0.0), measured(8, 0.0)) == f"nothing, for batch 1, 8: {NO_EVIDENCE}"


@pytest.mark.parametrize(("low", "noise_ratio"), [(0.04, 0.004), (2.0, 1.2), (2.0, math.inf)])
def test_noise_that_leaves_nothing_to_ask_for_is_said(low, noise_ratio):
    found = suggested(measured(1, 2.10), measured(8, low, noise_ratio))
    assert found == "nothing, for batch 8: the lower bound of its speedup, less the noise, is below 0.05x"


def test_a_measurement_that_was_disturbed_is_no_evidence():
    """The evidence had decided; the GPU was throttled."""
    reason = "1.40x (1.38x to 1.42x); this test asks for 1.15x; not decided: the GPU was throttled"
    disturbed = measured(8, 1.38, judgements=(judgement(Verdict.INCONCLUSIVE, reason=reason),))
    assert suggested(measured(1, 2.10), disturbed) == f"nothing, for batch 8: {reason}"


def test_a_wrong_replay_gets_no_marker():
    wrong = report("t.py::test_a", batch(1, judgement(Verdict.WRONG, gate="check")), measured(8, 1.3))
    assert suggestions([wrong]) == ["suggest: t.py::test_a: nothing, for it is wrong"]


def test_a_rehearsal_gets_no_marker():
    story = batch(1, judgement(Verdict.NOT_JUDGED, reason="speed is not judged: rehearsal on the CPU"))
    assert suggested(story) == "nothing, for speed is not judged: rehearsal on the CPU"


def test_a_test_that_was_not_measured_gets_no_marker():
    assert suggested(batch(1, judgement(gate="check"), timing=None)) == "nothing, for it was not measured"
    refused = report("t.py::test_a", judgements=(judgement(Verdict.NOT_CAPTURED, gate="audit"),))
    assert suggestions([replace(refused, batches=())]) == ["suggest: t.py::test_a: nothing, for it is not captured"]
