"""Workloads are ranked within what was proven, compared between runs, and none is lost."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from tests.facts import H200, batch, judgement, latency, report, timing

from pytest_cudagraph.report import WorkloadTest, document, json_text, ranking_tables, run_of_document, text_of
from pytest_cudagraph.report import cells_of as report_cells_of
from pytest_cudagraph.report import changes as report_changes
from pytest_cudagraph.report.workloads import ranks
from pytest_cudagraph.values import Interval, Verdict


def run(*reports, errors=(), device=H200):
    """A run as its file has it. Every report is of a workload of the group decoder."""
    marked = [WorkloadTest(nodeid=each.name, group="decoder", name=each.name) for each in reports]
    failed = [WorkloadTest(nodeid=name, group="decoder", name=name, error=text) for name, text in errors]
    plain = document(reports, device, {}, workloads=[*marked, *failed])
    return run_of_document(json.loads(json_text(plain)))


def cells_of(found):
    return report_cells_of(found.reports, found.workloads)


def rankings(found):
    return [line for table in ranking_tables(found.reports, found.workloads) for line in text_of(table)]


def changes(old, new):
    return report_changes(cells_of(old), cells_of(new))


def timed(name, eager_us, replay_us, compiled_us=None, *, busy_us=None, **rest):
    found = replace(timing(eager_us, replay_us, compiled_us), reference=latency(100.0))
    found = replace(found, busy_ns=busy_us and busy_us * 1e3)
    mode = "inductor" if compiled_us else "none"
    return report(name, batch(8, timing=found, **rest), compile_mode=mode)


def story():
    wrong = judgement(Verdict.WRONG, gate="check", reason="replay differs from eager in output[0]")
    slow = judgement(Verdict.FAILED, reason="replay is 1.02x eager; this test asks for 1.15x")
    refused = judgement(Verdict.NOT_CAPTURED, gate="audit", reason="the capture would be refused: host-sync")
    return run(
        timed("gpt2", 200.0, 100.0, busy_us=80.0),
        timed("gpt2-compiled", 200.0, 90.0, 150.0),
        report("llama", batch(8, slow, timing=timing(120.0, 118.0)), batch(16)),
        report("vit", batch(8, wrong)),
        replace(report("bert", judgements=(refused,)), batches=()),
        errors=[("mamba", "OutOfMemoryError: tried to allocate 20 GiB"), ("rwkv", None)],
    )


def ranked(found):
    cells = cells_of(found)
    return {(cell.workload, cell.batch_size, cell.way): rank for cell, rank in zip(cells, ranks(cells), strict=True)}


def test_the_tables_read_as_reviewed(golden):
    golden("report/workloads.txt", "\n".join(rankings(story())))


def test_what_the_intervals_cannot_tell_apart_shares_its_ranks():
    found = ranked(run(timed("a", 200.0, 100.0), timed("b", 200.0, 103.0), timed("c", 400.0, 300.0)))
    assert {key[0]: rank for key, rank in found.items() if key[2] == "graph"} == {"a": (1, 2), "b": (1, 2), "c": (5, 5)}
    assert found["a", 8, "eager"] == found["b", 8, "eager"] == (3, 4)


def test_the_ranks_among_a_group_and_batch_size_are_its_own():
    found = ranked(run(timed("a", 200.0, 100.0), report("b", batch(16, timing=timing(20.0, 10.0)))))
    assert found["a", 8, "graph"] == found["b", 16, "graph"] == (1, 1)


def test_a_machine_that_was_slower_meanwhile_decides_nothing():
    slow = replace(timing(260.0, 130.0), reference=latency(130.0))
    found = ranked(run(timed("a", 200.0, 100.0), report("b", batch(8, timing=slow))))
    assert found["a", 8, "graph"] == found["b", 8, "graph"] == (1, 2)


def test_eager_and_graph_of_one_measurement_are_ranked_by_their_judged_speedup():
    found = ranked(run(timed("a", 102.5, 100.0)))  # 1.025x, from 1.0045x to 1.0455x
    assert found == {("a", 8, "eager"): (2, 2), ("a", 8, "graph"): (1, 1)}


def test_eager_beside_two_compile_modes_is_one_cell():
    one, other = timed("x", 200.0, 100.0), timed("y", 210.0, 90.0, 150.0)
    marked = [WorkloadTest(nodeid=name, group="decoder", name="gpt2") for name in ("x", "y")]
    assert [cell.way for cell in report_cells_of([one, other], marked)] == [
        "eager",
        "graph",
        "inductor",
        "inductor + graph",
    ]


def test_a_rehearsal_is_shown_and_not_ranked():
    shown = judgement(Verdict.NOT_JUDGED, reason="speed is not judged: rehearsal on the CPU")
    found = run(report("a", batch(8, shown)))
    title, columns, *_ = rankings(found)
    assert title == "workloads: decoder; speed is not judged here"
    assert "latency" in columns
    assert "rank" not in columns
    assert changes(found, found) == ["0 moved, 0 within the intervals, 2 not compared"]
    assert rankings(run(report("a", batch(8))))[0] == "workloads: decoder"


def test_too_few_blocks_for_an_interval_are_too_few_for_a_rank():
    few = replace(timing(200.0, 100.0), speedup=Interval(estimate=2.0, low=0.0, high=math.inf))
    found = ranked(run(timed("a", 200.0, 100.0), report("b", batch(8, timing=few))))
    assert found["b", 8, "graph"] is found["b", 8, "eager"] is None
    assert found["a", 8, "graph"] == (1, 1)


def test_every_workload_is_there_with_its_latency_or_its_reason():
    reasons = {cell.workload: cell.reason for cell in cells_of(story()) if not cell.session}
    assert reasons == {
        "vit": "wrong: replay differs from eager in output[0]",
        "bert": "not captured: the capture would be refused: host-sync",
        "mamba": "OutOfMemoryError: tried to allocate 20 GiB",
        "rwkv": "nothing was measured",
    }


def test_a_test_that_failed_beside_its_measurement_has_a_row_with_the_reason():
    found = run(timed("a", 200.0, 100.0))
    failed = [replace(found.workloads[0], error="AssertionError: my own")]
    assert [(cell.way, cell.reason) for cell in report_cells_of(found.reports, failed)] == [
        ("eager", ""), ("graph", ""), ("-", "AssertionError: my own"),
    ]  # fmt: skip


def test_two_runs_differ_in_what_moved_beyond_the_intervals(golden):
    old = run(timed("a", 200.0, 100.0), timed("b", 200.0, 100.0), timed("c", 200.0, 100.0), timed("d", 200.0, 100.0))
    new = run(
        timed("a", 203.0, 103.0), timed("b", 200.0, 130.0), timed("c", 160.0, 80.0), timed("e", 200.0, 100.0),
        errors=[("d", "OutOfMemoryError: tried to allocate 20 GiB")],
    )  # fmt: skip
    golden("report/workload-changes.txt", "\n".join(changes(old, new)))
    assert changes(old, old) == ["0 moved, 8 within the intervals"]
