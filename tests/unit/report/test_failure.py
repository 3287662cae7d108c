"""The message of a failing test: found, allowed, evidence, device, remedy, in this order."""

from __future__ import annotations

from dataclasses import replace

from tests.facts import CPU, batch, judgement, report, timing

from pytest_cudagraph.report import failure_text
from pytest_cudagraph.values import Verdict

NAME = "tests/test_a.py::test_a"


def too_slow(batch_size, found="1.07"):
    return judgement(
        Verdict.FAILED,
        reason=f"replay is {found}x eager (95 % interval 1.05-1.09); this test asks for 1.15x",
        evidence=(
            "eager 120.0 µs, replay 112.1 µs, 34 interleaved blocks in 0.9 s, noise floor 0.4 %",
            "eager got faster than in the baseline (151.2 -> 120.0 µs), replay did not change",
        ),
        remedy=f"to accept: @pytest.mark.graph_speedup(min={{{batch_size}: 1.05}})",
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


def test_several_batch_sizes_come_worst_first(golden):
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
