"""What a run leaves for programs: the JSON document, JUnit's properties."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import pytest
from tests.facts import (
    CPU,
    H200,
    batch,
    generation,
    judgement,
    latency,
    modes,
    prefill,
    report,
    saved,
    sessions,
    timing,
)

from pytest_cudagraph.report import document, json_text, properties, render, rows_of, run_of_document
from pytest_cudagraph.values import Addition, Finding, Interval, NoBaseline, Receipt, Site, Verdict

NAME = "tests/test_a.py::test_a"

TIMING = (
    "speedup attainable_speedup eager compiled replay device_replay reference decision target_ratio noise_ratio "
    "detectable_ratio blocks discarded disturbance measure_seconds busy_seconds seed extended drift_ratio inner_calls "
    "notes weighed"
)
"""The keys of a batch size that one measurement fills."""


def rows_of_run(plain):
    return [row for each in run_of_document(plain).reports for row in rows_of(each)]


SETTINGS = {"min_speedup": 1.15, "batch_sizes": (1, 8), "baseline": Path(".cudagraph"), "json": None}


def story():
    findings = (
        Finding(
            id="baked-scalar",
            level="error",
            message="a number is baked in",
            fix="pass a tensor",
            site=Site(file="model.py", line=12),
            called_from=Site(file="tests/test_model.py", line=4, function="test_model"),
        ),
        Finding(id="rng", level="note", message="draws random numbers", fix="none needed"),
    )
    new = NoBaseline(comparison="new", reason="never saved")
    wrong = judgement(Verdict.WRONG, gate="check", reason="replay differs from eager in output[0]")
    return report(
        NAME,
        batch(1, baseline=saved(batch_size=1), timing=timing(120.0, 60.0, 80.0)),
        batch(8, judgement(reason="replay is 2.00x eager"), baseline=new, scenario=generation()),
        batch(16, wrong),
        batch(32, judgement(Verdict.NOT_CAPTURED, gate="capture"), receipt=None, timing=None, min_speedup=None),
        batch(4, scenario=modes(), speedup=modes().speedup, timing=None),
        findings=findings,
    )


def test_the_document_reads_as_reviewed(golden):
    golden("report/document.json", json_text(document([story()], H200, SETTINGS)))


def test_the_document_has_just_the_fields_of_its_schema():
    found = document([story()], H200, SETTINGS)

    assert set(found) == {"schema", "date", "commit", "device", "settings", "tests", "workloads", "tables"}
    (test,) = found["tests"]
    facts = "nodeid name verdict device gpu compile_mode compile_seconds findings judgements not_judged notes"
    assert set(test) == {*facts.split(), "batches"}
    assert set(test["findings"][0]) == set(
        "id level file line function called_from message evidence fix accepted loud".split()
    )
    fields = (
        "batch_size verdict word reason judgements min_speedup compile_seconds kernels capture_seconds memory_bytes "
        "receipt check comparison baseline base figures scenario"
    )
    fields = f"{fields} {TIMING}"
    assert all(set(each) == set(fields.split()) for each in test["batches"])
    assert set(test["batches"][0]["eager"]) == {"minimum", "q25", "median", "q75", "q90", "samples", "judged"}
    assert set(test["batches"][0]["speedup"]) == {"estimate", "low", "high"}


def test_timings_of_wrong_results_are_null():
    wrong = document([story()], H200, {})["tests"][0]["batches"][2]

    assert wrong["verdict"] == "wrong"
    assert {key for key, value in wrong.items() if value is None} == {
        *TIMING.split(), "compile_seconds", "baseline", "base", "scenario",
    }  # fmt: skip


def test_times_are_seconds_and_memory_is_bytes():
    first = document([story()], H200, {})["tests"][0]["batches"][0]

    eager = {"minimum": 0.0001164, "q25": 0.0001188, "median": 0.00012, "q75": 0.0001224, "q90": 0.000132}
    assert first["eager"] == eager | {"samples": 200, "judged": 0.00012}
    assert (first["capture_seconds"], first["measure_seconds"], first["memory_bytes"]) == (0.012, 0.9, 4096)


def test_a_baseline_says_where_a_session_of_unchanged_code_would_lie():
    quiet = replace(saved(), sessions=sessions(60.0, 60.6, 59.4, 60.3, 59.7, reference_us=100.0))
    slower_machine = replace(timing(), replay=latency(66.0), reference=latency(110.0))
    found = document([report(NAME, batch(8, baseline=quiet, timing=slower_machine))], H200, {})
    entry = found["tests"][0]["batches"][0]["baseline"]

    assert [each["median"] for each in entry["sessions"]] == [6e-05, 6.06e-05, 5.94e-05, 6.03e-05, 5.97e-05]
    assert entry["sessions"][0].keys() == set(
        "date commit software q25 median reference_q25 reference_median unrest_log figures".split()
    )
    unchanged = entry["unchanged"]
    assert (unchanged["statistic"], unchanged["divided"]) == ("median", True)
    # The centre is the sessions' level on the machine as it is now.
    assert math.sqrt(unchanged["low"] * unchanged["high"]) == pytest.approx(66e-6, rel=1e-4)
    # 1 % between five sessions, t = 2.132, and 0.3 of the reference's change.
    spread = statistics.stdev(math.log(each["median"]) for each in entry["sessions"])
    margin_log = 2.132 * spread * math.sqrt(1.2) + 0.3 * math.log(1.1)
    assert math.log(unchanged["high"] / 66e-6) == pytest.approx(margin_log, rel=1e-3)


def test_without_the_same_hardware_nothing_is_said_of_unchanged_code():
    found = document([report(NAME, batch(8, baseline=saved(device=CPU)))], H200, {})
    assert found["tests"][0]["batches"][0]["baseline"]["unchanged"] is None


def test_the_time_and_the_commit_of_a_run_are_told():
    commit = {"id": "1a2b3c4" * 5, "dirty": True}
    found = document([], H200, {}, date="2026-11-22T10:00:00+00:00", commit=commit)
    assert (found["date"], found["commit"]) == ("2026-11-22T10:00:00+00:00", commit)


def test_the_receipt_tells_of_a_graph_its_launches_and_why_there_were_none():
    missed = replace(batch().receipt, replays=3, opaque_regions=2, fallbacks=("the call launched nothing",))
    refused = judgement(Verdict.NOT_CAPTURED, gate="capture", reason="the capture was refused: not permitted")
    batches = (batch(8, receipt=missed), batch(16, refused, receipt=None, timing=None))
    found = [each["receipt"] for each in document([report(NAME, *batches)], H200, {})["tests"][0]["batches"]]

    assert found == [
        {
            "operations": 50,
            "nodes": 46,
            "kernel_names": {"aten.mul": 40, "aten.addmm": 6},
            "not_counted": "",
            "opaque_regions": 2,
            "replays": 3,
            "fallbacks": ["the call launched nothing"],
        },
        {
            "operations": None,
            "nodes": None,
            "kernel_names": {},
            "not_counted": "",
            "opaque_regions": None,
            "replays": 0,
            "fallbacks": ["the capture was refused: not permitted"],
        },
    ]


def test_how_far_the_check_went_is_told():
    opaque = replace(
        batch().agreement, adversaries=("zeros",), not_compared=("output[1] (Cache)",), notes=("a reservation",)
    )
    found = document([report(NAME, batch(8, agreement=opaque), batch(16, agreement=None))], H200, {})["tests"][0]

    assert [each["check"] for each in found["batches"]] == [
        {
            "batch_size": 8,
            "replays": 4,
            "leaves": 1,
            "state_tensors": 6,
            "eager_repeatable": True,
            "bit_exact": True,
            "adversaries": ["zeros"],
            "not_judged": [],
            "not_compared": ["output[1] (Cache)"],
            "warnings": [],
            "notes": ["a reservation"],
        },
        None,
    ]


def test_what_is_no_number_is_null():
    endless = replace(timing(), speedup=Interval(estimate=2.0, low=1.0, high=float("inf")))
    found = document([report(NAME, batch(timing=endless))], None, {"limit": float("nan")})

    assert json.loads(json_text(found))["tests"][0]["batches"][0]["speedup"]["high"] is None
    assert (found["device"], found["settings"]) == (None, {"limit": None})


def test_a_difference_that_is_no_number_loses_no_document():
    wrong = replace(prefill(), largest_difference=math.inf)
    call = Addition(nodeid="a", key="calls", entry={"name": "decode", "tokens_per_second": math.nan})
    found = json.loads(json_text(document([report("a", batch(2, scenario=wrong, timing=None))], H200, {}, [call])))
    assert found["tests"][0]["batches"][0]["scenario"]["result"]["largest_difference"] is None
    assert found["calls"] == [{"nodeid": "a", "name": "decode", "tokens_per_second": None}]


class Update(Enum):
    NEVER = "never"


@dataclass(frozen=True)
class Settings:
    update: Update
    minimum: dict[int, float]
    rootdir: Path


def test_settings_may_be_a_dataclass():
    settings = Settings(update=Update.NEVER, minimum={8: 1.15}, rootdir=Path("a"))

    assert document([], H200, settings)["settings"] == {"update": "never", "minimum": {"8": 1.15}, "rootdir": "a"}


def test_a_document_gives_the_table_of_its_run():
    compiled = replace(report("b"), batches=(), judgements=(judgement(Verdict.NOT_CAPTURED, gate="compile"),))
    more = judgement(gate="structure", reason="44 -> 46 kernels: +2 aten.mul")
    grown = report("c", batch(8, judgement(), more, baseline=replace(saved(), kernels=44)))
    found = json.loads(json_text(document([story(), compiled, grown], H200, {})))

    lines = render([*rows_of(story()), *rows_of(compiled), *rows_of(grown)])
    assert render(rows_of_run(found)) == lines
    assert {"compile not-captured", "44 -> 46 kernels: +2 aten.mul"} <= {line.strip() for line in lines}


def test_a_speedup_without_bounds_is_shown_as_the_run_showed_it():
    bounds = Interval(estimate=1.13, low=0.0, high=math.inf), Interval(estimate=1.2, low=1.1, high=math.inf)
    told = report(
        NAME,
        *(batch(at, timing=replace(timing(120.0, 106.0), speedup=each)) for at, each in enumerate(bounds, start=1)),
    )
    found = json.loads(json_text(document([told], H200, {})))
    assert [row.speedup for row in rows_of_run(found)] == list(bounds)
    assert render(rows_of_run(found)) == render(rows_of(told))


def test_what_concerns_the_model_as_a_whole_is_told():
    failed = judgement(
        Verdict.FAILED, gate="eager", reason="the model raised: no", evidence=("model.py:12",), remedy="fix"
    )
    told = replace(
        report(NAME),
        batches=(),
        judgements=(failed,),
        not_judged=("mylib::op",),
        notes=("training mode",),
        compile_ns=2e9,
    )
    (test,) = document([told], H200, {})["tests"]
    assert test["judgements"] == [
        {
            "gate": "eager",
            "verdict": "failed",
            "reason": "the model raised: no",
            "evidence": ["model.py:12"],
            "remedy": "fix",
            "accept": None,
            "hazard": "",
        }
    ]
    assert (test["not_judged"], test["notes"]) == (["mylib::op"], ["training mode"])
    assert (test["compile_mode"], test["compile_seconds"]) == (told.compile_mode, 2.0)


@pytest.mark.parametrize(
    "found", [[], {}, None, {"schema": 2, "tests": []}, {"schema": True, "tests": []}, {"benchmarks": []}]
)
def test_another_document_is_refused(found):
    with pytest.raises(ValueError, match="not a document of schema 1 as --cudagraph-json writes it"):
        rows_of_run(found)


@pytest.mark.parametrize(
    "edit",
    [
        lambda found: found.pop("tests"),
        lambda found: found["tests"].append(3),
        lambda found: found["tests"][0].pop("batches"),
        lambda found: found["tests"][0]["batches"][0].pop("eager"),
        lambda found: found["tests"][0]["batches"][0]["eager"].update(judged="fast"),
        lambda found: found["tests"][0]["batches"][0].update(speedup=[1, 2]),
        lambda found: found["tests"][0]["batches"][0]["judgements"][0].update(verdict=None),
    ],
)
def test_a_damaged_document_is_refused(edit):
    found = json.loads(json_text(document([story()], H200, {})))
    edit(found)

    with pytest.raises(ValueError, match="damaged: "):
        rows_of_run(found)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("capture_seconds", "x" * 100),
        ("capture_seconds", [1] * 100),
        ("capture_seconds", 10**400),
        ("capture_seconds", -1.0),
        ("compile_seconds", "1"),
        ("measure_seconds", math.inf),
        ("busy_seconds", math.nan),
        ("batch_size", 10**400),
        ("batch_size", math.inf),
        ("batch_size", 0),
        ("batch_size", True),
        ("kernels", "46"),
        ("judgements", "abc"),
        ("judgements", [None]),
        ("speedup", {"estimate": None, "low": 1.0, "high": 2.0}),
        ("receipt", None),
        ("base", {"revision": 3}),
        ("baseline", []),
        ("baseline", {"replay": None}),
        ("check", {"replays": 1e400}),
        ("scenario", {"kind": "x"}),
        ("replay", {"q25": 0.0}),
        ("figures", {"ttft": 3}),
        ("comparison", {}),
    ],
)
def test_a_value_of_another_kind_is_one_error_and_takes_no_memory(key, value):
    found = json.loads(json_text(document([story()], H200, {})))
    found["tests"][0]["batches"][0][key] = value
    with pytest.raises(ValueError, match="damaged: "):
        run_of_document(found)


@pytest.mark.parametrize(
    ("key", "value"),
    [("name", {}), ("nodeid", 3), ("gpu", 3), ("device", {"name": 3}), ("findings", [{"file": "a"}]), ("notes", "abc"),
     ("not_judged", [3]), ("compile_mode", "fast"), ("judgements", {}), ("batches", {})],
)  # fmt: skip
def test_a_fact_of_another_kind_is_one_error(key, value):
    found = json.loads(json_text(document([story()], H200, {})))
    found["tests"][0][key] = value
    with pytest.raises(ValueError, match="damaged: tests: 0: "):
        run_of_document(found)


def test_what_is_computed_is_not_read():
    found = json.loads(json_text(document([story()], H200, {})))
    changed = json.loads(json_text(found))
    changed["tests"][0].update(verdict="passed")
    for each in changed["tests"][0]["batches"]:
        each.update(verdict=3, word=[], reason={}, attainable_speedup="x")
    assert run_of_document(changed) == run_of_document(found)


def test_properties_are_flat_text():
    receipt = Receipt(batch_size=8, operations=None, kernels=None)

    assert properties(report(NAME, batch(8), batch(16, receipt=receipt, timing=None))) == [
        ("cudagraph.verdict", "passed"),
        ("cudagraph.batch_8.verdict", "passed"),
        ("cudagraph.batch_8.speedup", "2.00"),
        ("cudagraph.batch_8.speedup_low", "1.96"),
        ("cudagraph.batch_8.speedup_high", "2.04"),
        ("cudagraph.batch_8.eager_seconds", "0.00012"),
        ("cudagraph.batch_8.replay_seconds", "6e-05"),
        ("cudagraph.batch_8.kernels", "46"),
        ("cudagraph.batch_16.verdict", "passed"),
    ]


def test_properties_of_named_calls_do_not_collide():
    plain, named = report(NAME, nodeid=f"{NAME}@gpu0"), report("decoder", nodeid=NAME, device=CPU)

    assert properties(plain)[0] == ("cudagraph.verdict", "passed")
    assert properties(named)[0] == ("cudagraph.decoder.verdict", "passed")


def test_properties_of_wrong_results_hold_no_timings():
    wrong = judgement(Verdict.WRONG, gate="check")

    assert [key for key, _ in properties(report(NAME, batch(8, wrong)))] == [
        "cudagraph.verdict",
        "cudagraph.batch_8.verdict",
        "cudagraph.batch_8.kernels",
    ]
