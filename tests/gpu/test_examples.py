"""The examples on CUDA: the tests among them through ``demo.py``, and the scripts."""

from __future__ import annotations

import re

import pytest
from tests.gpu.processes import HERE, output_of
from tests.gpu.sizes import on_emulated_device

EXAMPLES = HERE.parents[1] / "examples"

by_triton = pytest.mark.needs_triton("Inductor compiles for CUDA with Triton")


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["not compiled", pytest.param("compiled", marks=by_triton)])
def test_the_demo_captures_every_example_and_each_test_passes(chosen, tmp_path):
    budget_s = 0.1 if on_emulated_device() else 5  # no speed is judged there
    options = (f"--cudagraph-time-budget={budget_s}", f"--cudagraph-baseline={tmp_path}", "-k", chosen)
    lines = output_of(EXAMPLES / "demo.py", *options).splitlines()
    assert re.search(r"=+ \d+ passed", lines[-1]), lines[-1]
    assert not any("not captured" in line for line in lines), "\n".join(lines)


@pytest.mark.slow
def test_the_server_answers_four_threads_as_eager_does():
    first, *_, last = output_of(EXAMPLES / "serving_runner.py").splitlines()
    assert first.startswith("200 calls on cuda:0: ")
    assert last == "all 200 answers agree with eager"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", pytest.param("default", marks=by_triton)])
def test_the_pipeline_gets_eagers_answers_also_of_a_model_that_cannot_be_captured(mode):
    lines = output_of(EXAMPLES / "drop_in_compiler.py", mode).splitlines()
    assert lines[-1] == "all 12 answers agree with eager"
    assert any(line.startswith(f"scorer ({mode}) on cuda:0: 6 calls: 5 graph, ") for line in lines), lines
    assert any(line.startswith(f"adaptive ({mode}) on cuda:0: 6 calls: 0 graph, ") for line in lines), lines
