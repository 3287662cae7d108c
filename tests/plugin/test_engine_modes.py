"""The ``engine_modes`` fixture: two processes, one verdict, and what the report shows of both."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.plugin.conftest import failure_of

ROOT = Path(__file__).parents[2]

GOOD = """
from engines import CountingEngine
from pytest_cudagraph import InputError
import pytest

PROMPTS = [[1, 2], [3, 4]]

def test_counts(engine_modes):
    found = engine_modes(CountingEngine(), prompts=PROMPTS, output_length=6, min_speedup=0.001, requests=7)
    assert found is None or found.tokens.rows == 2
    with pytest.raises(InputError, match="output_lengths takes distinct whole numbers of tokens of at least 2"):
        engine_modes(CountingEngine(), prompts=PROMPTS, output_length=1, name="short")

@pytest.mark.decode(output_lengths=[4], min_speedup=0.001)
def test_falls_back(engine_modes):
    engine_modes(CountingEngine("raises in load"), prompts=PROMPTS, generations=2, allow_fallback=True)
"""

FAULTS = """
import pytest
from engines import CountingEngine

@pytest.mark.parametrize("fault", ["raises in load", "raises in generate", "other tokens", "eager steps", "no room"])
def test_fault(engine_modes, fault):
    engine_modes(CountingEngine(fault), prompts=[[1, 2], [3, 4]], output_length=6, generations=1, requests=5)
"""


@pytest.fixture
def engines(project):
    (project.path / "engines.py").write_text((ROOT / "tests" / "engines.py").read_text())
    return project


def test_both_modes_are_compared_shown_and_saved(engines):
    engines.pytester.makepyfile(test_user=GOOD)
    result = engines.measure("--cudagraph-update", "--cudagraph-json=run.json")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        [
            "*counts[[]modes] * 2 * 0.00x *passed",
            "*falls_back[[]modes] * 2 * not judged",
            "engine modes * mode *load * capture * host * device *TTFT * ITL * tokens/s * replays * errors",
            "*nts[[]modes] * eager * 0/50 * 0/14",
            "*nts[[]modes] * graphs * 5 ms * 50/50 * 0/14",
            "*ack[[]modes] * eager * 0/6 * -",
            "*ack[[]modes] * graphs * failed * -",
            "note: *falls_back[[]modes]: fell back to eager: with graphs the engine does not*",
        ]
    )
    result.stdout.no_fnmatch_line("not written:*")
    (saved,) = engines.path.glob(".cudagraph/*.json")
    assert saved.read_text().count("test_counts[modes]")
    assert "test_falls_back" not in saved.read_text()
    found = json.loads((engines.path / "run.json").read_text())["tests"]
    modes = found[1]["batches"][0]["scenario"]["result"]
    assert modes["tokens"] is None
    assert modes["graphs"]["failure"]["error"].startswith("RuntimeError: capture failed:")
    assert modes["graphs"]["failure"]["output"] == ["loading {}"]
    assert found[0]["batches"][0]["scenario"]["result"]["graphs"]["receipt"]["replays"] == 50


def test_an_engine_that_is_slower_than_its_saved_session_fails(engines):
    engines.pytester.makepyfile(test_user=GOOD.partition("@pytest.mark")[0])
    engines.measure("--cudagraph-update").assert_outcomes(passed=1)
    (saved,) = engines.path.glob(".cudagraph/*.json")
    pattern = re.compile(r'"(median|q1|q3|min)": ([0-9.e-]+)')
    saved.write_text(pattern.sub(lambda each: f'"{each[1]}": {float(each[2]) / 1000:g}', saved.read_text()))
    result = engines.measure("--cudagraph-max-slowdown=1")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*SlowerThanBaseline: batch 2: replay is * slower than the baseline *"])


CONTINUOUS = """
from pytest_cudagraph import transformers_engine

def test_batching(engine_modes):
    engine = transformers_engine("examples.test_engine_modes:make_llama", max_length=32, batching="continuous")
    engine_modes(engine, prompts=[[5, 17, 42], [7]], output_length=6, generations=1)
"""


def test_transformers_continuous_batching_falls_back_on_a_cpu_and_its_own_words_are_shown(project):
    pytest.importorskip("transformers.generation.continuous_batching")
    project.pytester.makepyfile(test_user=CONTINUOUS)
    project.pytester.syspathinsert(ROOT)
    result = project.measure()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*FellBackToEager: batch 2: fell back to eager: 5 of 5 decode steps replayed no graph",
            "* 5 steps: transformers turned its graphs off",
            "*no graph backend is available: turning off accelerator graphs.",
        ]
    )


def test_without_the_flag_only_the_eager_mode_runs_and_nothing_is_judged(engines):
    engines.pytester.makepyfile(test_user=GOOD, test_faults=FAULTS)
    result = engines.run()
    result.assert_outcomes(passed=7)
    result.stdout.no_fnmatch_line("*engine modes*")


def test_a_process_of_a_comparison_of_revisions_starts_no_engine(engines):
    body = "from engines import CountingEngine\ndef test_a(engine_modes):\n"
    body += "    assert engine_modes(CountingEngine('never loaded'), prompts=[[1]]) is None\n"
    engines.pytester.makepyfile(test_user=body)
    engines.measure(f"--cudagraph-sample={engines.path}").assert_outcomes(passed=1)


def test_a_faulty_engine_fails_with_the_gate_that_found_it(engines, golden):
    engines.pytester.makepyfile(test_user=FAULTS)
    result = engines.measure()
    result.assert_outcomes(failed=5)
    assert "src/pytest_cudagraph" not in result.stdout.str()
    golden("plugin/engine-modes-faults.txt", failure_of(result))
