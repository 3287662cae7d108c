"""The scripts among the examples; those that are tests run by themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script, *arguments):
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_server_answers_four_threads_as_eager_does():
    found = run("serving_runner.py")
    assert found.returncode == 0, found.stdout + found.stderr
    first, *_, last = found.stdout.splitlines()
    assert first.startswith("200 calls on ")
    assert last == "all 200 answers agree with eager"


@pytest.mark.slow
def test_the_pipeline_gets_eagers_answers_also_of_a_model_that_cannot_be_captured():
    found = run("drop_in_compiler.py", "none")
    assert found.returncode == 0, found.stdout + found.stderr
    lines = found.stdout.splitlines()
    assert lines[-1] == "all 12 answers agree with eager"
    assert any(line.startswith("scorer (none) on ") and "5 graph, 0 compiled, 1 eager" in line for line in lines)
    assert any(line.startswith("adaptive (none) on ") and "0 graph, 0 compiled, 6 eager" in line for line in lines)
    assert "logged once: adaptive: not captured: batch 8: " in found.stderr
