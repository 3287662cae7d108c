"""The scripts among the examples; those that are tests run by themselves."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a script. Gives its exit code and the lines of its output."""

    def run(script, *arguments):
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        return end.value.code, capsys.readouterr().out.splitlines()

    return run


@pytest.mark.slow
def test_the_server_answers_four_threads_as_eager_does(run):
    code, (first, *_, last) = run("serving_runner.py")
    assert first.startswith("200 calls on ")
    assert last == "all 200 answers agree with eager"
    assert code == 0


@pytest.mark.slow
def test_the_pipeline_gets_eagers_answers_also_of_a_model_that_cannot_be_captured(run, caplog):
    code, lines = run("drop_in_compiler.py", "none")
    assert lines[-1] == "all 12 answers agree with eager"
    assert any(line.startswith("scorer (none) on ") and "5 graph, 0 compiled, 1 eager" in line for line in lines)
    assert any(line.startswith("adaptive (none) on ") and "0 graph, 0 compiled, 6 eager" in line for line in lines)
    assert caplog.messages[0].startswith("adaptive: not captured: batch 8: ")
    assert code == 0


@pytest.mark.slow
def test_a_plain_pytest_run_of_the_examples_fails_nowhere_and_skips_with_a_reason():
    command = [sys.executable, "-m", "pytest", str(EXAMPLES), "-q", "-rs", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=EXAMPLES.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    *_, last = done.stdout.splitlines()
    assert re.match(r"\d+ passed, \d+ skipped", last), last
    assert (
        "test_linear_classifier.py:31: the model has run once, and nothing was measured: add --cudagraph" in done.stdout
    )
