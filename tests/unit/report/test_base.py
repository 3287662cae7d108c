"""Two revisions side by side in the summary."""

from __future__ import annotations

from dataclasses import replace
from html import escape

from tests.facts import H200, batch, report

from pytest_cudagraph.base_revision.judge import base_change, base_tables, judge_base
from pytest_cudagraph.report import document, page, run_of_document, text_of
from pytest_cudagraph.values import BaseComparison


def compared(head_us, **changed):
    base = tuple(100_000.0 + step for step in range(5))
    found = BaseComparison(
        revision="HEAD~1 (a1b2c3d)",
        base_replay_ns=base,
        head_replay_ns=tuple(head_us * 1e3 + step for step in range(5)),
        base_kernels=46,
        head_kernels=62,
    )
    found = replace(found, **changed)
    return replace(found, change=base_change(found))


def judged(size, base):
    return replace(batch(size), base=base, judgements=(judge_base(base, 0.05),))


def lines_of(reports):
    return [line for table in base_tables(reports) for line in text_of(table)]


def test_both_sides_of_every_test_stand_side_by_side(golden):
    missing = BaseComparison(revision="HEAD~1 (a1b2c3d)", missing="new: not in the base")
    slower, same = judged(1, compared(110.0)), judged(8, compared(100.0, head_kernels=46))
    reports = [
        report("tests/test_a.py::test_mlp", slower, same),
        report("tests/test_b.py::test_gpt", judged(8, compared(80.0)), judged(32, missing)),
    ]
    golden("report/base.txt", "\n".join(lines_of(reports)))


def test_a_run_without_a_base_has_no_such_table():
    assert base_tables([report("tests/test_a.py::test_mlp", batch(1))]) == []


def test_base_and_head_divide_to_the_change_also_where_the_reference_divided_it():
    reference = {"base_reference_ns": (100_000.0,) * 5, "head_reference_ns": (80_000.0,) * 5}
    title, _, row = lines_of([report("tests/test_a.py::test_mlp", judged(1, compared(94.0, **reference)))])
    assert title == (
        "replay at HEAD~1 (a1b2c3d) (base) and in the working tree (head); lower quartiles of processes; "
        "head as fast as the reference workload was for base"
    )
    assert row.split()[2:8] == ["100.0", "µs", "117.5", "µs", "+18", "%"]


def test_the_page_has_the_interval_and_the_latency_that_the_gate_judged():
    spread = compared(110.0, base_replay_ns=(90e3, 95e3, 100e3, 105e3, 140e3))
    reports = [report("tests/test_a.py::test_mlp", judged(1, spread))]
    (judgement,) = reports[0].batches[0].judgements
    (table,) = base_tables(reports)
    text = page(run_of_document(document(reports, H200, {}, tables=[table])))
    assert [column.title for column in table.columns][5] == "99 % interval"
    assert "99% interval -26 % to +50 %" in judgement.reason
    # The geometric mean of the base, which the change is relative to, and no median.
    assert table.rows[0][2:6] == ("104.7 µs", "110.0 µs", "+5.1 %", "-26 % to +50 %")
    assert all(f">{escape(cell)}</td>" in text for cell in table.rows[0])
    assert "95 % interval</th>" not in text
