"""The message of a failing test: found, allowed, evidence, device, remedy, in this order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.facts import CPU, batch, judgement, report, timing

from pytest_cudagraph.report import failure_text
from pytest_cudagraph.values import MinSource, Verdict

NAME = "tests/test_a.py::test_a"


def too_slow(batch_size=8, found="1.07", accept=1.05):
    return judgement(
        Verdict.FAILED,
        reason=f"replay is {found}x eager (95 % interval 1.05-1.09); this test asks for 1.15x",
        evidence=(
            "eager 120.0 µs, replay 112.1 µs, 34 interleaved blocks in 0.9 s, noise floor 0.4 %",
            "eager got faster than in the baseline (151.2 -> 120.0 µs), replay did not change",
        ),
        accept=accept,
    )


WRONG = judgement(
    Verdict.WRONG,
    gate="check",
    reason="replay differs from eager in output['logits']",
    evidence=("Mismatched elements: 12 / 512\nGreatest absolute difference: 0.37 at (0, 17)",),
    remedy="see the finding baked-scalar",
)


def test_one_slow_batch_size_reads_as_reviewed(golden):
    golden("report/failure-one.txt", failure_text(report(NAME, batch(1), batch(8, too_slow(8)))))


def test_of_several_batch_sizes_the_worst_are_told_in_the_order_of_their_numbers(golden):
    slower = judgement(
        Verdict.FAILED, gate="baseline", reason="replay is 18 % slower than the baseline", remedy="to accept: update"
    )
    batches = [
        batch(1, too_slow(1, "1.12"), timing=timing(112.0, 100.0)),
        batch(2, too_slow(2, "1.01"), slower, timing=timing(101.0, 100.0)),
        batch(4, judgement(gate="check"), WRONG),
        batch(8, too_slow(8, "1.10"), timing=timing(110.0, 100.0)),
        batch(16, judgement()),
        batch(32, too_slow(32, "1.13"), timing=timing(113.0, 100.0)),
        batch(64, too_slow(64, "1.14"), timing=timing(114.0, 100.0)),
    ]

    golden("report/failure-several.txt", failure_text(report(NAME, *batches)))


def last_lines(*batches, **rest):
    text = failure_text(report(NAME, *batches, **rest))
    return [line.strip() for line in text.splitlines() if "to accept" in line]


def test_one_line_accepts_all_batch_sizes_and_keeps_what_the_others_are_held_to():
    batches = [batch(1, min_speedup=2.0), batch(4, too_slow(4)), batch(8, too_slow(8, accept=0.9), min_speedup=1.125)]
    line = "to accept: @pytest.mark.graph_speedup(min={1: 2.00, 4: 1.05, 8: 0.90})"
    assert last_lines(*batches) == [line]
    precise = [batch(1, min_speedup=1.125), batch(4, too_slow(4))]
    assert last_lines(*precise) == ["to accept: @pytest.mark.graph_speedup(min={1: 1.125, 4: 1.05})"]


def test_also_batch_sizes_that_are_not_told_are_accepted():
    sizes = (1, 2, 4, 8, 16)
    assert last_lines(*(batch(size, too_slow(size)) for size in sizes)) == [
        "to accept: @pytest.mark.graph_speedup(min=1.05)"
    ]


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (MinSource(), "@pytest.mark.graph_speedup(min=1.05)"),
        (
            MinSource(place="marker"),
            "@pytest.mark.graph_speedup(min=1.05) in place of the marker that asks for more",
        ),
        (
            MinSource(place="marker", is_mapping=True),
            "@pytest.mark.graph_speedup(min={4: 1.05, 8: 1.05}) in place of the marker that asks for more",
        ),
        (MinSource(place="argument"), "min_speedup=1.05 in the call: its argument overrides markers"),
        (
            MinSource(place="argument", is_mapping=True),
            "min_speedup={4: 1.05, 8: 1.05} in the call: its argument overrides markers",
        ),
    ],
)
def test_what_is_to_be_accepted_is_said_for_the_place_that_decides(source, line):
    assert last_lines(batch(4, too_slow(4)), batch(8, too_slow(8)), min_source=source) == [f"to accept: {line}"]


def test_nothing_is_to_be_accepted_where_one_batch_size_would_still_fail():
    assert last_lines(batch(4, too_slow(4)), batch(8, too_slow(8, accept=None))) == []


def test_what_is_undecided_above_its_target_keeps_it():
    above = judgement(Verdict.INCONCLUSIVE, reason="between 1.15x and 1.21x")
    below = judgement(Verdict.INCONCLUSIVE, reason="between 1.10x and 1.21x", accept=1.1)
    assert last_lines(batch(1, above), batch(8, below)) == [
        "to accept: @pytest.mark.graph_speedup(min={1: 1.15, 8: 1.10})"
    ]
    assert last_lines(batch(1, above)) == []


def test_of_kernels_and_of_slowdowns_the_largest_is_to_be_accepted():
    def failed(gate, accept):
        return judgement(Verdict.FAILED, gate=gate, accept=accept)

    batches = [batch(size, failed("structure", size), failed("base", size / 100)) for size in (4, 8, 1)]
    assert last_lines(*batches) == [
        "to accept: @pytest.mark.graph_speedup(max_new_kernels=8), or "
        "pytest tests/test_a.py::test_a --cudagraph --cudagraph-update",
        "to accept: --cudagraph-base-slowdown=0.08",
    ]


def test_what_is_missing_under_strict_is_said_once_with_its_batch_sizes():
    lacks = judgement(
        Verdict.NOT_JUDGED,
        gate="baseline",
        reason="not compared: no entry in .cudagraph/nvidia-h200.json yet; --cudagraph-strict asks for one",
        remedy="to save one: pytest --cudagraph --cudagraph-update",
    )
    batches = [batch(size, judgement(), lacks, comparison="new") for size in (4, 1)]
    assert failure_text(report(NAME, *batches, batch(8))) == (
        "batch 1, 4: not compared: no entry in .cudagraph/nvidia-h200.json yet; --cudagraph-strict asks for one\n"
        "  NVIDIA H200, driver 580.159, torch 2.11.0\n"
        "  to save one: pytest --cudagraph --cudagraph-update"
    )


def test_what_concerns_the_model_comes_first_and_without_a_batch_size(golden):
    audit = judgement(
        Verdict.NOT_CAPTURED,
        gate="audit",
        reason="host-sync: model.py:12 reads a tensor's value on the host",
        evidence=("aten::_local_scalar_dense",),
        remedy="keep the value on the device: torch.where",
    )
    golden("report/failure-model.txt", failure_text(replace(report(NAME, device=CPU), batches=(), judgements=(audit,))))


def test_without_a_failure_everything_unproved_is_told():
    open_ = judgement(Verdict.INCONCLUSIVE, reason="between 1.10x and 1.21x after 10.0 s", remedy="more time")

    assert failure_text(report(NAME, batch(1), batch(8, judgement(gate="check"), open_))) == (
        "batch 8: between 1.10x and 1.21x after 10.0 s\n  NVIDIA H200, driver 580.159, torch 2.11.0\n  more time"
    )


def test_with_a_failure_only_failures_are_told():
    open_ = batch(1, judgement(Verdict.INCONCLUSIVE, reason="cannot tell"))

    text = failure_text(report(NAME, open_, batch(8, too_slow(8), judgement(Verdict.NOT_JUDGED, gate="baseline"))))
    assert "cannot tell" not in text
    assert "not-judged" not in text


def test_a_batch_size_is_not_said_twice():
    named = judgement(Verdict.FAILED, reason="batch 8: too slow")

    assert failure_text(report(NAME, batch(8, named))).splitlines()[0] == "batch 8: too slow"


def test_a_sentence_of_several_lines_is_indented_after_its_first():
    long = judgement(Verdict.WRONG, gate="check", reason="outputs differ\nat (0, 17)", evidence=("once",))

    assert failure_text(report(NAME, batch(8, long), device=None)) == "batch 8: outputs differ\n  at (0, 17)\n  once"


def test_the_last_line_leads_to_the_pages_of_the_hazards_once_each():
    hazards = ("rng", "host-sync", "rng", "host-data", "unknown-op")
    wrong = [judgement(Verdict.WRONG, gate="audit", remedy=f"fix: {each}", hazard=each) for each in hazards]
    last = failure_text(replace(report(NAME, batch(8, *wrong[:1])), judgements=tuple(wrong))).splitlines()

    assert last[-1] == "  more: pytest-cudagraph explain rng host-sync host-data"
    assert sum(line.startswith("  more:") for line in last) == 1


def test_a_batch_size_that_is_not_told_names_no_page():
    told = [batch(size, too_slow(size)) for size in (1, 2, 4, 8)]
    hidden = batch(16, judgement(Verdict.PASSED, gate="check", hazard="rng"))

    assert "more:" not in failure_text(report(NAME, *told, hidden))
