"""Reports travel between processes as plain values, and arrive as they were."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import MappingProxyType

import pytest
from tests.facts import (
    CPU,
    MODE_FAILURE,
    batch,
    generation,
    guided,
    judgement,
    latency,
    lookup,
    modes,
    prefill,
    report,
    saved,
    timing,
)

from pytest_cudagraph.report import from_plain as built
from pytest_cudagraph.report import report_to_plain as to_plain
from pytest_cudagraph.values import (
    Column,
    Finding,
    GraphReport,
    Interval,
    NoBaseline,
    Receipt,
    Site,
    Table,
    Verdict,
    stored,
)


def from_plain(plain):
    return built(GraphReport, plain)


def everything():
    site = Site(file="model.py", line=12, function="forward")
    finding = Finding(id="rng", level="note", message="m", fix="f", evidence="e", site=site, loud=False)
    timed = replace(timing(compiled_us=80.0), device_replay=latency(50.0), notes=("quiet",), extended=True)
    batches = (
        batch(1, baseline=saved(batch_size=1, compiled=latency(80.0), device=CPU), timing=timed, comparison="faster"),
        batch(2, judgement(Verdict.FAILED, evidence=("a", "b"), remedy="r"), baseline=None, compile_ns=5),
        batch(
            4,
            baseline=NoBaseline(comparison="new", reason="never saved"),
            comparison="new",
        ),
        replace(batch(8), timing=None, receipt=None, agreement=None, min_speedup=None, judgements=()),
    )
    judgements = (judgement(Verdict.WRONG, gate="audit"),)
    return report("a", *batches, findings=(finding, replace(finding, site=None)), judgements=judgements)


def test_a_report_comes_back_as_it_was():
    assert from_plain(to_plain(everything())) == everything()


def test_a_report_comes_back_through_json():
    assert from_plain(json.loads(json.dumps(to_plain(everything())))) == everything()


def test_the_smallest_report_comes_back():
    smallest = replace(report(), device=None, batches=())

    assert from_plain(to_plain(smallest)) == smallest


@pytest.mark.parametrize(
    "scenario",
    [
        generation(),
        prefill(),
        lookup(),
        guided(),
        replace(modes(), eager=replace(modes().eager, failure=MODE_FAILURE)),
    ],
    ids=lambda scenario: scenario.kind,
)
def test_a_scenario_of_decoding_comes_back_with_its_tables_document_and_properties(scenario):
    arrived = from_plain(json.loads(json.dumps(to_plain(report("a", batch(4, scenario=scenario)))))).at(4).scenario

    assert arrived.tables("a") == scenario.tables("a")
    assert arrived.document() == json.loads(json.dumps(scenario.document()))
    assert arrived.properties() == scenario.properties()


class Draws:
    """A scenario of another plugin."""

    kind, has_entry = "draws", False

    def tables(self, test):
        columns = (Column(title="", right=False), Column(title="draws"))
        return (Table(title="draws", columns=columns, rows=((test, "3"),)),)

    def document(self):
        return {"draws": 3, "seconds": [0.5]}

    def properties(self):
        return {"draws": "3"}


def test_what_a_feature_measured_comes_back_without_its_class():
    sent = report("a", batch(8, scenario=Draws()))

    arrived = from_plain(json.loads(json.dumps(to_plain(sent))))

    assert arrived.at(8).scenario == stored(Draws(), "a")
    assert from_plain(to_plain(arrived)) == arrived
    assert not arrived.at(8).has_entry


def test_verdicts_come_back_as_verdicts():
    assert from_plain(to_plain(everything())).at(2).judgements[0].verdict is Verdict.FAILED


def kinds(value):
    yield type(value)
    if type(value) is dict:
        for key, item in value.items():
            yield from (*kinds(key), *kinds(item))
    if type(value) is list:
        for item in value:
            yield from kinds(item)


class Float(float):
    """As numpy's float64 is one: equal to a float, and refused by execnet."""


def test_only_plain_types_travel():
    names = MappingProxyType({"aten.mul": 3})
    receipt = Receipt(batch_size=8, operations=3, kernels=3, kernel_names=names)
    odd = replace(timing(), speedup=Interval(estimate=Float(2), low=Float(1), high=Float(3)))

    plain = to_plain(report("a", batch(8, receipt=receipt, timing=odd)))
    assert set(kinds(plain)) <= {dict, list, str, int, float, bool, type(None)}
    assert from_plain(plain).at(8).receipt.kernel_names == {"aten.mul": 3}


def test_what_cannot_travel_is_named():
    with pytest.raises(TypeError, match="a report cannot carry a object"):
        to_plain(report("a", not_judged=(object(),)))


@pytest.mark.parametrize("plain", [{}, {"nodeid": "a"}, {"unknown": 1}, None, 3])
def test_what_is_no_report_is_refused(plain):
    with pytest.raises(ValueError, match=r"is missing|a mapping is needed"):
        from_plain(plain)


def test_a_worker_sends_numbers_that_no_document_has():
    endless = replace(
        timing(), speedup=Interval(estimate=2.0, low=0.0, high=math.inf), noise_ratio=math.inf, seed=2**70,
        replay=replace(latency(1.0), minimum_ns=0.0),
    )  # fmt: skip
    sent = report("a", batch(8, judgement(accept=math.inf), timing=endless))
    assert from_plain(json.loads(json.dumps(to_plain(sent)))) == sent
