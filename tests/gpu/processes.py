"""Running a script in a process of its own, so that what it breaks is broken there only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest_cudagraph

HERE = Path(__file__).parent
IMPORTED = (Path(pytest_cudagraph.__file__).resolve().parents[1], HERE.parents[1])
"""The folders of the package and of ``tests``."""
TIMEOUT_S = 180
"""Importing torch and making a context take seconds; a hanging GPU must not hang the suite."""


def last_line_of(script: str, *arguments: str) -> str:
    """The last line that a script of this folder prints."""
    return output_of(HERE / script, *arguments).splitlines()[-1]


def output_of(script: Path, *arguments: str) -> str:
    """What the script prints; an error with all of its output where it fails."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, IMPORTED), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
