"""Two revisions side by side in the summary."""

from __future__ import annotations

from dataclasses import replace

from tests.facts import batch, report

from pytest_cudagraph.base_revision.judge import base_change, base_table, judge_base
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


def test_both_sides_of_every_test_stand_side_by_side(golden):
    missing = BaseComparison(revision="HEAD~1 (a1b2c3d)", missing="new: not in the base")
    slower, same = judged(1, compared(110.0)), judged(8, compared(100.0, head_kernels=46))
    reports = [
        report("tests/test_a.py::test_mlp", slower, same),
        report("tests/test_b.py::test_gpt", judged(8, compared(80.0)), judged(32, missing)),
    ]
    golden("report/base.txt", "\n".join(base_table(reports)))


def test_a_run_without_a_base_has_no_such_table():
    assert base_table([report("tests/test_a.py::test_mlp", batch(1))]) == []


def test_base_and_head_divide_to_the_change_also_where_the_reference_divided_it():
    reference = {"base_reference_ns": (100_000.0,) * 5, "head_reference_ns": (80_000.0,) * 5}
    title, _, row = base_table([report("tests/test_a.py::test_mlp", judged(1, compared(94.0, **reference)))])
    assert title == (
        "replay at HEAD~1 (a1b2c3d) (base) and in the working tree (head), lower quartiles of processes; "
        "head as fast as the reference workload was for base"
    )
    assert row.split()[2:8] == ["100.0", "µs", "117.5", "µs", "+18", "%"]
