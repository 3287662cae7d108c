"""A refused capture names the cause and leaves a process in which everything works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.gpu.after_a_refusal import KINDS

import pytest_cudagraph

SCRIPT = Path(__file__).with_name("after_a_refusal.py")
SOURCE = Path(pytest_cudagraph.__file__).resolve().parents[1]
TIMEOUT_S = 180
"""Importing torch and making a context take seconds; a hanging GPU must not hang the suite."""


def run(*kinds):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(SCRIPT), *kinds]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.splitlines()[-1] == f"fine after: {' '.join(kinds)}"


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_refused_capture_the_process_works_as_before(kind):
    run(kind)


def test_refusals_one_after_the_other_do_not_add_up():
    run(*KINDS, *KINDS)
