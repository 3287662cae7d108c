"""The table and the lines below it: narrow, complete, and silent where there is nothing to say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.facts import CPU, EMULATED, H200, batch, judgement, report, saved, timing

from pytest_cudagraph.report import closing, header, table
from pytest_cudagraph.report.columns import shorten
from pytest_cudagraph.values import (
    Agreement,
    BatchReport,
    Finding,
    GraphReport,
    Interval,
    MinSource,
    Receipt,
    Site,
    Verdict,
)

LONG = "tests/integration/decoders/test_speculative_decoding.py::TestSpeculative::test_decoder_with_draft[fp16-1024]"

WRONG = judgement(
    Verdict.WRONG,
    gate="check",
    reason="replay differs from eager in output['logits']: 12 of 512 elements differ, at most 0.37 at (0, 17), "
    "where 1e-05 is allowed",
)


def story():
    """One row of every kind."""
    more = judgement(gate="structure", reason="46 -> 62 kernels: +16 `aten.mul`")
    counted = Receipt(batch_size=4, operations=80, kernels=62)
    return [
        report(
            "tests/test_a.py::test_mlp",
            batch(1, timing=timing(250.0, 50.0)),
            batch(4, judgement(), more, receipt=counted, baseline=saved(batch_size=4), timing=timing(1200.0, 700.0)),
            batch(8, judgement(Verdict.FAILED), timing=timing(120.0, 112.1), comparison="same"),
            batch(96, judgement(), judgement(Verdict.FAILED, gate="baseline"), timing=timing(5000.0, 4999.0)),
        ),
        report(
            LONG,
            batch(1, WRONG, timing=timing()),
            batch(2, judgement(Verdict.NOT_CAPTURED, gate="capture", reason="operation not permitted: .item()")),
            batch(4, judgement(Verdict.INCONCLUSIVE, reason="between 1.10x and 1.21x after 10.0 s")),
        ),
        replace(
            report("tests/test_a.py::test_compile"),
            batches=(),
            judgements=(judgement(Verdict.NOT_CAPTURED, gate="compile", reason="the compile ran past 60.0 s"),),
        ),
    ]


def compiled_story():
    return [
        report(LONG, batch(8, timing=timing(1200.0, 600.0, 812.5)), batch(256, timing=timing(31200.0, 600.0, 539.9))),
        report("encoder", batch(8)),
    ]


def crowded_story():
    """Too many columns for the intervals."""
    return [*compiled_story(), *story()[1:2]]


def emulated():
    not_judged = judgement(Verdict.NOT_JUDGED, reason="speed is not judged: this is an emulated CUDA device")
    return [report("tests/test_a.py::test_mlp", batch(1, not_judged), device=EMULATED)]


def rehearsal():
    not_judged = judgement(Verdict.NOT_JUDGED, reason="speed is not judged: this is a rehearsal on a CPU")
    return [report("tests/test_a.py::test_mlp", batch(1, not_judged), batch(8, not_judged), device=CPU)]


@pytest.mark.parametrize("name", ["story", "compiled_story", "crowded_story", "rehearsal", "emulated"])
def test_the_table_reads_as_reviewed_and_is_narrow(golden, name):
    lines = table(globals()[name]())

    golden(f"report/{name}.txt", "\n".join(lines))
    assert max(len(line) for line in lines) <= 100


def test_nothing_is_said_of_nothing():
    assert table([]) == []


def test_devices_have_a_table_each():
    lines = table([report("a"), report("b", device=CPU), report("c")])

    assert [line for line in lines if "torch" in line] == [
        "NVIDIA H200, driver 580.159, torch 2.11.0",
        "cpu: AMD EPYC 9B45, torch 2.13.0+cpu",
    ]
    assert [line[0] for line in lines] == ["N", "t", "a", "c", "c", "t", "b"]


def test_timings_of_wrong_results_are_not_shown():
    wrong, _ = table([report("a", batch(8, WRONG))])[2:4]

    assert wrong.split() == ["a", "8", "-", "-", "-", "1.15x", "wrong"]


def test_a_report_without_a_device_has_a_row():
    assert table([report("a", batch(8, judgement(Verdict.NOT_JUDGED), timing=None), device=None)])[0] == "no device"


def test_a_name_cannot_break_a_line():
    lines = table([report("bad\nname\x1b[31m")])

    assert len(lines) == 3
    assert lines[2].startswith("bad?name?[31m")


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [("abc", 3, "abc"), ("abcd", 3, "…cd"), ("abcdefghij", 7, "ab…ghij"), ("", 5, "")],
)
def test_a_name_is_shortened_in_its_middle(text, width, expected):
    assert shorten(text, width) == expected
    assert len(expected) <= width


COUNTS = {"passed": 3, "failed": 0, "slower": 1, "not captured": 1, "new": 1, "stale": 1}


def test_the_counts_name_only_what_there_is():
    assert closing([], COUNTS) == ["3 passed, 1 slower, 1 not captured, 1 new, 1 stale"]


def test_a_gain_is_named_with_what_keeps_it():
    gain = judgement(gate="baseline", reason="replay is 15 % faster than the baseline", remedy="to keep: --update")
    batches = [batch(1, judgement(), gain), batch(2, judgement(Verdict.FAILED), gain)]
    found = report("t.py::a", *(replace(each, comparison="faster") for each in batches))

    lines = closing([found], {"passed": 1, "faster": 1})
    assert lines[1:] == ["faster: t.py::a, batch 1: replay is 15 % faster than the baseline; to keep: --update"]


def test_no_counts_at_all_are_said():
    assert closing([], {"passed": 0}) == ["nothing measured"]


def test_the_lines_below_read_as_reviewed(golden):
    refusal = "failed: replay is 1.07x eager (95 % interval 1.05-1.09); this test asks for 1.15x"
    lines = closing(
        [*story(), *rehearsal()],
        COUNTS,
        wrote=(8, ".cudagraph/nvidia-h200.json"),
        refused=[(LONG, size, refusal) for size in (8, 16)],
        stale=[(f"tests/test_old.py::test_{number}", 8) for number in range(7)],
    )

    golden("report/closing.txt", "\n".join(lines))
    assert all(len(line) <= 100 or LONG in line for line in lines)


def test_every_entry_that_was_replaced_is_named_with_what_was_accepted():
    text = "replay 56.7 -> 243.9 µs (+330 %), 32 -> 62 kernels"
    replaced = [(f"test_a.py::test_{number}", 8, text) for number in range(51)]
    lines = closing([], COUNTS, wrote=(51, "a.json"), replaced=replaced)
    assert lines[1:3] == [
        f"accepted: test_a.py::test_0, batch 8: {text}",
        f"accepted: test_a.py::test_1, batch 8: {text}",
    ]
    assert lines[50:] == [
        f"accepted: test_a.py::test_49, batch 8: {text}",
        "accepted: ... and 1 more",
        "wrote 51 entries to a.json",
    ]


def test_what_has_no_baseline_yet_is_said_with_the_whole_command_that_saves_one():
    lacks = judgement(Verdict.NOT_JUDGED, gate="baseline", reason="not compared: no entry in a.json yet")
    found = report("a", batch(8, judgement(), lacks, comparison="new"))
    assert table([found])[2].endswith("  no baseline yet")
    assert closing([found], {"no baseline yet": 1})[1:] == [
        "not compared: no entry in a.json yet (1 batch size)",
        "no baseline yet; to save one: pytest --cudagraph --cudagraph-update",
    ]
    assert closing([found], {"no baseline yet": 1}, saves=True)[2:] == [
        "no baseline yet: an entry is saved when its test passes every gate"
    ]


def test_one_entry_is_one_entry():
    assert closing([], COUNTS, wrote=(1, "a.json"))[-1] == "wrote 1 entry to a.json"


def test_the_header_says_what_is_measured_on_and_against():
    assert header(H200, baseline=".cudagraph/nvidia-h200.json", min_speedup=1.15, judged=True) == (
        "cudagraph: NVIDIA H200, driver 580.159, torch 2.11.0; baseline .cudagraph/nvidia-h200.json; gate 1.15x"
    )


def test_the_header_calls_a_rehearsal_one():
    assert header(CPU, baseline=".cudagraph/cpu-amd-epyc-9b45.json", min_speedup=1.15, judged=False) == (
        "cudagraph: cpu: AMD EPYC 9B45, torch 2.13.0+cpu, 2 threads; baseline .cudagraph/cpu-amd-epyc-9b45.json; "
        "rehearsal: speed is not judged"
    )


def test_the_header_says_that_an_emulated_device_is_no_gpu():
    assert header(EMULATED, baseline=".cudagraph/emulated.json", min_speedup=1.15, judged=False) == (
        "cudagraph: Emulated CUDA device (host memory), no GPU, torch 2.13.0+cu130; "
        "baseline .cudagraph/emulated.json; rehearsal: speed is not judged"
    )


WARNED = Finding(
    id="baked-scalar",
    level="warning",
    message="the call reads the date",
    fix="pass it",
    site=Site(file=str(Path.cwd() / "model.py"), line=20),
)


def test_what_limits_the_proof_is_noted_once_with_its_batch_sizes():
    note = "eager itself gives NaN in output; NaN is compared as equal"
    batches = tuple(
        BatchReport(
            batch_size=size,
            judgements=(),
            min_speedup=1.15,
            agreement=Agreement(
                batch_size=size,
                replays=2,
                leaves=1,
                state_tensors=0,
                bit_exact=True,
                eager_repeatable=True,
                warnings=("it proves almost nothing",),
                notes=(note,),
                not_compared=("output[1] (Cache)", "state 'graph'"),
            ),
        )
        for size in (1, 8)
    )
    noted = GraphReport(
        nodeid="a.py::test_a",
        name="a.py::test_a",
        device=None,
        compile_mode="none",
        batches=batches,
        findings=(WARNED, replace(WARNED, level="note")),
        not_judged=("custom operator mine::op",),
        min_source=MinSource(place="marker", is_mapping=True, default_sizes=(8,)),
    )
    assert closing([noted], {"passed": 2})[1:] == [
        "warning: a.py::test_a: model.py:20: the call reads the date [baked-scalar]; fix: pass it",
        "warning: a.py::test_a, batch 1, 8: it proves almost nothing",
        f"note: a.py::test_a, batch 1, 8: {note}",
        "note: a.py::test_a, batch 1, 8: not compared: output[1] (Cache), state 'graph'",
        "note: a.py::test_a, batch 8: min names no target; 1.15x is the default (--cudagraph-min-speedup)",
        "note: a.py::test_a: not judged: custom operator mine::op",
    ]


def test_a_warning_without_a_line_names_no_place():
    warned = GraphReport(
        nodeid="a.py::test_a",
        name="a.py::test_a",
        device=None,
        compile_mode="none",
        findings=(replace(WARNED, site=None),),
    )
    assert closing([warned], {"passed": 1})[1:] == [
        "warning: a.py::test_a: the call reads the date [baked-scalar]; fix: pass it"
    ]


def test_an_interval_without_an_end_is_left_out():
    endless = replace(timing(), speedup=Interval(estimate=3.28, low=0.0, high=float("inf")))
    row = next(line for line in table([report("test_a.py::test_a", batch(1, timing=endless))]) if "3.28x" in line)
    assert "inf" not in row
    assert "(" not in row


def test_a_size_that_was_not_measured_says_what_there_is():
    with pytest.raises(KeyError, match=r"no batch size 8; there are \[4\]"):
        report("a", batch(4)).at(8)
    with pytest.raises(KeyError, match="no batch size 8; without --cudagraph none"):
        replace(report("a", batch(4)), batches=()).at(8)


def test_a_long_table_shows_what_did_not_pass_and_says_how_many_rows_there_are():
    failed = judgement(Verdict.FAILED, reason="replay is 1.07x eager; this test asks for 1.15x")
    reports = [report(f"tests/test_a.py::test_{number}", batch(8, judgement())) for number in range(40)]
    assert len(table(reports)) == 42
    lines = table([*reports, report("tests/test_a.py::test_slow", batch(8, failed))])
    assert [line.split()[0] for line in lines[1:]] == ["test", "test_a.py::test_slow", "40"]
    assert lines[-1] == "40 rows without a failure not shown; --cudagraph-html=PATH writes a page with all"
    assert len(table([*reports, *reports])) == 2
