"""The table of generations."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from tests.facts import H200, MODE_FAILURE, batch, generation, guided, guided_times, lookup, modes, prefill, report

from pytest_cudagraph.report import document, json_text, properties, scenario_tables, text_of
from pytest_cudagraph.values import Interval


def shown(reports):
    return "\n".join(line for table in scenario_tables(reports) for line in text_of(table))


def test_the_table_reads_as_reviewed(golden):
    reports = [
        report("tests/test_a.py::test_a[prompt16-output32]", batch(8, scenario=generation())),
        report("tests/test_a.py::test_b"),
        report("tests/test_a.py::test_c", batch(8, scenario=generation(times=None))),
    ]
    reports += [
        report(
            f"tests/test_a.py::test_d[{length}]",
            batch(8, scenario=generation(prompt_length=length, prompt_lengths=(512, 4096))),
        )
        for length in (512, 4096)
    ]
    golden("report/generations.txt", shown(reports))


def test_the_table_of_prefills_reads_as_reviewed(golden):
    reports = [report("tests/test_a.py::test_a[prefill32768-chunk2048]", batch(1, scenario=prefill())), report()]
    golden("report/prefills.txt", shown(reports))


def test_the_table_of_prompt_lookups_reads_as_reviewed(golden):
    golden(
        "report/lookups.txt",
        shown([report("a.py::test_a", batch(2, scenario=lookup())), report()]),
    )


def test_the_table_of_guided_generations_reads_as_reviewed(golden):
    plain = guided(times=None, tokens=None, is_parsed=False, grammar="ebnf")
    reports = [report("a.py::test_a", batch(4, scenario=guided())), report("a.py::test_b", batch(4, scenario=plain))]
    golden("report/guided.txt", shown(reports))


def test_the_document_of_a_guided_generation_has_its_counts_and_times_in_seconds():
    endless = replace(guided_times(), overhead=Interval(estimate=0.05, low=0.04, high=math.inf))
    whole = document([report("a", batch(scenario=guided(times=endless)))], H200, {})
    found = json.loads(json_text(whole))["tests"][0]["batches"][0]["scenario"]["result"]
    assert (found["completed"], found["cut"], found["valid"], found["valid_ratio"]) == (3, 1, 2, 2 / 3)
    assert found["times"]["mask"] == 7e-07
    assert found["times"]["overhead"] == {"estimate": 0.05, "low": 0.04, "high": None}


def test_the_table_of_engines_reads_as_reviewed(golden):
    failed = modes()
    failed = replace(failed, graphs=replace(failed.eager, failure=MODE_FAILURE, times=None, load_ns=None))
    untold = replace(modes().graphs, receipt=None)
    reports = [
        report("a.py::test_a[modes]", batch(2, scenario=modes())),
        report("a.py::test_b[modes]", batch(2, scenario=failed)),
        report("a.py::test_c[modes]", batch(2, scenario=modes(graphs=untold))),
    ]
    golden("report/engine_modes.txt", shown(reports))


def test_junit_has_what_each_mode_took():
    found = dict(properties(report("a.py::test_a", batch(2, scenario=modes(), timing=None, receipt=None))))
    assert {key.removeprefix("cudagraph.batch_2."): value for key, value in found.items()} == {
        "cudagraph.verdict": "passed",
        "verdict": "passed",
        "speedup": "2.00",
        "eager_load_seconds": "2.1",
        "eager_host_bytes": "4.194e+08",
        "eager_ttft_seconds": "0.00095",
        "eager_itl_seconds": "0.00012",
        "eager_tokens_per_second": "6.25e+04",
        "graphs_load_seconds": "2.6",
        "graphs_capture_seconds": "0.31",
        "graphs_host_bytes": "4.404e+08",
        "graphs_device_bytes": "3.221e+09",
        "graphs_ttft_seconds": "0.0009",
        "graphs_itl_seconds": "6e-05",
        "graphs_tokens_per_second": "1.25e+05",
    }


def test_without_a_timed_generation_there_is_no_table():
    assert scenario_tables([report("a", batch(scenario=generation(times=None)))]) == []


def test_junit_has_the_medians():
    found = dict(properties(report("tests/test_a.py::test_a", batch(8, scenario=generation()))))
    prefix = "cudagraph.batch_8"
    assert found[f"{prefix}.tokens_per_second"] == "1.25e+05"
    assert (found[f"{prefix}.ttft_seconds"], found[f"{prefix}.itl_seconds"]) == ("0.0009", "6e-05")
