"""A scenario is shown, written and sent without a word of the core about it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from tests.facts import H200, batch, report

from pytest_cudagraph.report import (
    document,
    from_plain,
    json_text,
    properties,
    report_to_plain,
    scenario_tables,
    step_summary,
    table,
)
from pytest_cudagraph.values import Column, GraphReport, Interval, Table, stored


@dataclass(frozen=True)
class Baking:
    """A scenario of a feature that the core does not know."""

    loaves: int
    has_entry: bool = False
    kind: str = "baking"

    def tables(self, test):
        columns = (Column(title="", right=False), Column(title="loaves"), Column(title="oven", right=False))
        return (Table(title="baking", columns=columns, rows=((test, str(self.loaves), "hot"),)),)

    def document(self):
        return {"loaves": self.loaves, "seconds": 0.5}

    def properties(self):
        return {"loaves": str(self.loaves)}


def baked(name, loaves, **rest):
    return report(name, batch(2, scenario=Baking(loaves), timing=None, **rest))


def test_the_tables_of_all_scenarios_are_joined_by_title_and_columns():
    (joined,) = scenario_tables([baked("tests/test_a.py::test_a", 3), report(), baked("tests/test_a.py::test_b", 5)])
    assert joined.rows == (("tests/test_a.py::test_a", "3", "hot"), ("tests/test_a.py::test_b", "5", "hot"))
    assert scenario_tables([report()]) == []


def test_terminal_and_step_summary_show_them():
    reports = [baked("tests/test_a.py::test_a", 3)]
    assert table(reports)[-2:] == ["baking             loaves  oven", "test_a.py::test_a       3  hot"]
    assert "tests/test_a.py::test_a       3  hot" in step_summary(reports, (), room_bytes=1 << 20, is_strict=False)


def test_document_and_junit_have_its_result_and_properties():
    reports = [baked("a.py::test_a", 3, speedup=Interval(estimate=2.0, low=1.9, high=2.1))]
    found = json.loads(json_text(document(reports, H200, {})))["tests"][0]["batches"][0]
    assert found["scenario"]["result"] == {"loaves": 3, "seconds": 0.5}
    assert (found["scenario"]["kind"], found["scenario"]["has_entry"]) == ("baking", False)
    assert found["scenario"]["tables"][0]["rows"] == [["a.py::test_a", "3", "hot"]]
    assert dict(properties(reports[0]))["cudagraph.batch_2.loaves"] == "3"


def test_another_process_gets_what_is_shown_and_written():
    sent = baked("a.py::test_a", 3)
    received = from_plain(GraphReport, json.loads(json.dumps(report_to_plain(sent))))
    assert received.batches[0].scenario == stored(Baking(3), "a.py::test_a")
    assert scenario_tables([received]) == scenario_tables([sent])
    assert document([received], H200, {}) == document([sent], H200, {})
    assert properties(received) == properties(sent)


def test_the_scenario_says_whether_a_baseline_has_an_entry_of_it():
    assert not batch(2, scenario=Baking(1)).has_entry
    assert batch(2, scenario=replace(Baking(1), has_entry=True)).has_entry
    assert batch(2).has_entry
